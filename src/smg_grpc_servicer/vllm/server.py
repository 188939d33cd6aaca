"""The vLLM worker's program: `python -m smg_grpc_servicer.vllm MODEL`.

It takes the flags of vLLM's engine and our own, and gives what vLLM's own gRPC launcher cannot:
TLS, a drain as long as it takes, a port of its own, health before the model is loaded.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from typing import TYPE_CHECKING

from smg_grpc_servicer.serving.health import Health, State
from smg_grpc_servicer.serving.lifecycle import EXIT_SETTINGS, EXIT_START, leave, run
from smg_grpc_servicer.serving.proto_check import problem
from smg_grpc_servicer.settings import VllmSettings
from smg_grpc_servicer.vllm import arguments
from smg_wire.errors import SettingsError, SmgError, StartError
from smg_wire.settings import build_parser, load

if TYPE_CHECKING:
    from collections.abc import Sequence

    import grpc
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.engine.protocol import EngineClient

    from smg_grpc_servicer.serving.generation import Generations
    from smg_grpc_servicer.vllm.worker import VllmWorker
    from smg_wire.errors import EngineDead
    from smg_wire.observability import WorkerMetrics

PROGRAM = "python -m smg_grpc_servicer.vllm"


class Program:
    """A `lifecycle.Worker`: it builds the engine while the server already answers."""

    def __init__(
        self,
        engine_arguments: AsyncEngineArgs,
        settings: VllmSettings,
        health: Health,
        metrics: WorkerMetrics,
    ) -> None:
        from smg_grpc_servicer.vllm.gate import Gate
        from smg_grpc_servicer.vllm.worker import SERVICE

        self.services: Sequence[str] = (SERVICE,)
        self._engine_arguments = engine_arguments
        self._settings = settings
        self._health = health
        self._metrics = metrics
        self._started = time.time()
        self._gate = Gate(health)
        self._worker: VllmWorker | None = None

    @property
    def generations(self) -> Generations:
        """The live requests; there are none before the engine is up."""
        assert self._worker is not None  # noqa: S101  (the lifecycle asks after start)
        return self._worker.generations

    def register(self, server: grpc.aio.Server) -> None:
        """Add the engine's service to the server."""
        from smg_grpc_proto.generated import vllm_engine_pb2_grpc

        vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(self._gate, server)

    async def start(self) -> None:
        """Load the engine and put the servicer behind the gate."""
        from smg_grpc_servicer.vllm import plugin
        from smg_grpc_servicer.vllm.servicer import VllmEngineServicer
        from smg_grpc_servicer.vllm.worker import VllmWorker

        # In a thread: it takes as long as the model takes to load.
        client = await asyncio.to_thread(self._build)
        self._health.to(State.WARMING)
        plugin.report_kv_events(client, self._settings)
        # vLLM starts it with the first request otherwise, and statistics would wait for that.
        client._run_output_handler()
        self._worker = VllmWorker(
            client,
            self._settings,
            health=self._health,
            metrics=self._metrics,
            guards_methods=False,
        )
        self._worker.kv_events.start()
        self._gate.open(VllmEngineServicer(client, self._started))

    def _build(self) -> EngineClient:
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.async_llm import AsyncLLM

        from smg_grpc_servicer.vllm import plugin

        context = UsageContext.OPENAI_API_SERVER
        try:
            config = self._engine_arguments.create_engine_config(usage_context=context)
        except (ValueError, OSError, NotImplementedError) as error:
            raise StartError(" ".join(str(error).split())) from error
        plugin.turn_kv_events_on(config, self._settings)
        named = {
            "usage_context": context,
            "enable_log_requests": self._engine_arguments.enable_log_requests,
            "disable_log_stats": self._engine_arguments.disable_log_stats,
        }
        plugin.keep_statistics(named)
        client: EngineClient = AsyncLLM.from_vllm_config(vllm_config=config, **named)
        return client

    async def died(self) -> EngineDead:
        """Wait for the engine's death."""
        assert self._worker is not None  # noqa: S101
        return await self._worker.died()

    async def close(self) -> None:
        """Stop the engine's processes, those of a start that was broken off included."""
        from smg_grpc_servicer.vllm import engine, plugin

        if self._worker is not None:
            await self._worker.stop()
            await asyncio.to_thread(engine.shut_down, self._worker.engine_client)
        await asyncio.to_thread(engine.kill_children)
        plugin.remove_directories()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the worker; return the exit code of `smg_grpc_servicer.serving.lifecycle`."""
    # The model is a directory or in the local cache: a worker never waits for a model hub.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    ours, theirs = arguments.part(sys.argv[1:] if argv is None else argv)
    try:
        if any(word in ("-h", "--help") for word in theirs):
            return _print_help()
        load(VllmSettings, ours, prog=PROGRAM)
        arguments.check_installed()
        skew = problem("vllm")
        if skew is not None:
            raise StartError(skew)
        engine_arguments = arguments.engine_arguments(theirs)
    except SmgError as error:
        print(f"error: {error.message}", file=sys.stderr)
        return EXIT_SETTINGS if isinstance(error, SettingsError) else EXIT_START

    def program(settings: VllmSettings, health: Health, metrics: WorkerMetrics) -> Program:
        return Program(engine_arguments, settings, health, metrics)

    return run(VllmSettings, program, engine="vllm", argv=ours)


def _print_help() -> int:
    build_parser(VllmSettings, prog=PROGRAM).print_help()
    print("\nAll other flags are vLLM's:\n")
    arguments.check_installed()
    arguments.parser().print_help()
    return 0


if __name__ == "__main__":
    leave(main())

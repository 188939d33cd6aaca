"""The least around a real engine that its loads and KV events can be read from.

Takes vLLM's own arguments, and `--port`. Generate streams tokens for token ids, FlushCache resets
the prefix cache; nothing is validated.
"""

from __future__ import annotations

import asyncio
import signal
import uuid
from typing import TYPE_CHECKING, Any

import grpc
from grpc_health.v1 import health_pb2_grpc
from smg_grpc_proto.generated import common_pb2, vllm_engine_pb2_grpc
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from smg_grpc_servicer.serving.health import Health, HealthServicer, State
from smg_grpc_servicer.serving.interceptors import Guard, GuardInterceptor
from smg_grpc_servicer.vllm.events import KvEvents
from smg_grpc_servicer.vllm.loads import load_board
from smg_grpc_servicer.vllm.telemetry import TelemetryMethods
from smg_wire.observability import WorkerMetrics

if TYPE_CHECKING:
    import argparse
    from collections.abc import AsyncIterator


class Servicer(TelemetryMethods, vllm_engine_pb2_grpc.VllmEngineServicer):
    def __init__(self, engine: Any, health: Health) -> None:
        self._engine = engine
        self._loads = load_board(engine, engine.vllm_config)
        self._kv_events = KvEvents(engine, engine.vllm_config, self._loads, health)
        self._kv_events.start()

    async def close(self) -> None:
        await self._kv_events.close()

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[Any]:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        ids = list(request.tokenized.input_ids)
        params = SamplingParams(
            temperature=0.0,
            max_tokens=request.sampling_params.max_tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        forwarded = self._loads.forwarded(len(ids))
        outputs = self._engine.generate({"prompt_token_ids": ids}, params, uuid.uuid4().hex)
        try:
            async for output in outputs:
                forwarded.produced()
                chunk = pb.GenerateStreamChunk(token_ids=output.outputs[0].token_ids)
                yield pb.GenerateResponse(chunk=chunk)
        finally:
            forwarded.ended()
            await outputs.aclose()

    async def FlushCache(self, request: Any, context: Any) -> common_pb2.FlushCacheResponse:
        return common_pb2.FlushCacheResponse(success=await self._engine.reset_prefix_cache())


async def serve(args: argparse.Namespace) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    health = Health()
    config = AsyncEngineArgs.from_cli_args(args).create_engine_config()
    engine = AsyncLLM.from_vllm_config(config, disable_log_stats=args.disable_log_stats)
    servicer = Servicer(engine, health)
    guard = Guard(metrics=WorkerMetrics("vllm"))
    server = grpc.aio.server(interceptors=[GuardInterceptor(guard)])
    vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(servicer, server)
    health_pb2_grpc.add_HealthServicer_to_server(HealthServicer(health, ()), server)
    server.add_insecure_port(f"127.0.0.1:{args.port}")
    await server.start()
    health.to(State.SERVING)
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    await stop.wait()
    health.to(State.DRAINING)
    await server.stop(5)
    await servicer.close()
    engine.shutdown()


if __name__ == "__main__":
    import uvloop
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    parser.add_argument("--port", type=int)
    # The loop that vLLM's own launcher has.
    uvloop.run(serve(AsyncEngineArgs.add_cli_args(parser).parse_args()))

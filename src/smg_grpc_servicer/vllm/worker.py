"""The vLLM worker's composition root: everything that stands round one engine client."""

from __future__ import annotations

import asyncio
import atexit
import logging
import weakref
from typing import TYPE_CHECKING, Any

from smg_grpc_proto.generated import vllm_engine_pb2

from smg_grpc_servicer.serving.generation import Generations
from smg_grpc_servicer.serving.health import STATE_LABELS, Health, State
from smg_grpc_servicer.serving.interceptors import Guard, GuardInterceptor
from smg_grpc_servicer.serving.server import start_metrics
from smg_grpc_servicer.settings import VllmSettings
from smg_grpc_servicer.vllm import engine, launcher, plugin
from smg_grpc_servicer.vllm.bridge import EngineBridge
from smg_grpc_servicer.vllm.events import KvEvents
from smg_grpc_servicer.vllm.loads import load_board
from smg_wire.errors import EngineDead, SmgError
from smg_wire.observability import WorkerMetrics, configure_logging, configure_tracing
from smg_wire.settings import load

if TYPE_CHECKING:
    from collections.abc import Coroutine, Sequence

    from vllm.config import VllmConfig
    from vllm.engine.protocol import EngineClient

_logger = logging.getLogger(__name__)

ENGINE_SERVICE = vllm_engine_pb2.DESCRIPTOR.services_by_name["VllmEngine"]
SERVICE = ENGINE_SERVICE.full_name
HEALTH_SERVICE = "grpc.health.v1.Health"

_workers: weakref.WeakValueDictionary[int, VllmWorker] = weakref.WeakValueDictionary()


class VllmWorker:
    """One engine client and what serves it.

    Args:
        engine_client: vLLM's AsyncLLM.
        settings: ours; the engine's own are in its `vllm_config`.
        health: the state to show; a new one when not given.
        metrics: the families to fill; new ones when not given.
        api_keys: what callers must present; nothing when empty.
        guards_methods: `protect` wraps. False where the server's interceptor guards them.
    """

    def __init__(
        self,
        engine_client: EngineClient,
        settings: VllmSettings,
        *,
        health: Health | None = None,
        metrics: WorkerMetrics | None = None,
        api_keys: Sequence[str] = (),
        guards_methods: bool = True,
    ) -> None:
        self.engine_client = engine_client
        self.config: VllmConfig = engine_client.vllm_config
        self.settings = settings
        self.health = health or Health()
        self.metrics = metrics or WorkerMetrics("vllm")
        self.guard = Guard(metrics=self.metrics, api_keys=api_keys)
        self.loads = load_board(engine_client, self.config)
        self.kv_events = KvEvents(engine_client, self.config, self.loads, self.health)
        self.bridge = EngineBridge(engine_client, self.loads)
        self.generations = Generations(
            health=self.health,
            metrics=self.metrics,
            abort_engine=self.bridge.abort,
            engine_speaks_last=True,
            slots=engine.slots(self.config),
            max_queued=settings.max_queued_requests,
        )
        self._guards_methods = guards_methods
        self._tasks: set[asyncio.Task[Any]] = set()
        self.metrics.set_model(engine.served_model_name(self.config))
        engine.export_metrics(self.metrics.registry)
        # By identity: an engine client need not be hashable. An id is not used again while the
        # worker lives, because the worker holds its client.
        _workers[id(engine_client)] = self

    def protect(self, servicer: object) -> None:
        """Put the guard round every method of a servicer of the engine's service.

        Where the server has our interceptor already, this does nothing.
        """
        self._protect(servicer, SERVICE, [(m.name, m.server_streaming) for m in _methods()])

    def protect_health(self, servicer: object) -> None:
        """Put the guard round every method of a grpc.health.v1 servicer."""
        methods = [("Check", False), ("List", False), ("Watch", True)]
        self._protect(servicer, HEALTH_SERVICE, methods)

    def _protect(self, servicer: object, service: str, methods: list[tuple[str, bool]]) -> None:
        if not self._guards_methods:
            return
        for name, streams in methods:
            guarded = self.guard.wrap(
                f"/{service}/{name}", getattr(servicer, name), streams=streams
            )
            setattr(servicer, name, guarded)

    async def died(self) -> EngineDead:
        """Wait for the engine's death and return its reason."""
        return await engine.died(self.engine_client)

    def run(self, work: Coroutine[Any, Any, Any]) -> None:
        """Run something beside the RPCs, kept until it ends; its failure is logged."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    async def stop(self) -> None:
        """End the KV events' streams and what `run` still runs."""
        await self.kv_events.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            _logger.error("%s failed", task.get_coro(), exc_info=task.exception())


def _methods() -> Sequence[Any]:
    methods: Sequence[Any] = ENGINE_SERVICE.methods
    return methods


def worker_of(engine_client: EngineClient) -> VllmWorker:
    """Return the worker of an engine client; the first call makes it.

    Under vLLM's launcher that call checks the launcher's flags, starts the metrics port, shapes
    the server that is built next and begins to watch the engine; what cannot be served as asked
    ends the process with one line.
    """
    known = _workers.get(id(engine_client))
    if known is not None:
        return known
    flags = launcher.arguments()
    if flags is None:
        return VllmWorker(engine_client, load(VllmSettings, (), prog=launcher.OURS))
    try:
        launch = launcher.launch(flags)
        launcher.check_port(launch.settings)
        return _launched(engine_client, launch)
    except SmgError as error:
        # The engine is up already: it must not outlive us.
        engine.shut_down(engine_client)
        launcher.refuse(error)


def _launched(engine_client: EngineClient, launch: launcher.Launch) -> VllmWorker:
    from smg_grpc_servicer.vllm.under_launcher import end_with_the_engine

    settings = launch.settings
    configure_logging(settings.log_level, settings.log_format)
    atexit.register(configure_tracing(settings.otlp_traces_endpoint, service="smg-vllm"))
    plugin.report_kv_events(engine_client, settings)
    worker = VllmWorker(engine_client, settings, api_keys=launch.api_keys)
    worker.health.subscribe(lambda state: worker.metrics.set_state(state.label, STATE_LABELS))
    atexit.register(start_metrics(settings, worker.metrics))
    interceptor = GuardInterceptor(worker.guard, guarded_services=(SERVICE, HEALTH_SERVICE))
    launcher.shape_next_server(interceptor, settings)
    worker.run(end_with_the_engine(worker))
    worker.kv_events.start()
    # The launcher builds the engine before the servicer: nothing is left to wait for.
    worker.health.to(State.SERVING)
    return worker

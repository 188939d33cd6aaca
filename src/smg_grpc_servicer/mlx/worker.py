"""The MLX worker: the engine, its servicer, and the requests between them."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from prometheus_client import Gauge
from smg_grpc_proto.generated import mlx_engine_pb2_grpc

from smg_grpc_servicer.mlx.config import EngineConfig
from smg_grpc_servicer.mlx.engine import MlxEngine
from smg_grpc_servicer.mlx.servicer import MlxServicer
from smg_grpc_servicer.mlx.text import TextInput
from smg_grpc_servicer.serving.generation import Generations
from smg_grpc_servicer.serving.health import Health, State

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import grpc
    from prometheus_client import CollectorRegistry

    from smg_grpc_servicer.mlx.engine import EngineStats
    from smg_grpc_servicer.settings import MlxSettings
    from smg_wire.errors import EngineDead
    from smg_wire.observability import WorkerMetrics

SERVICE = "mlx.grpc.engine.MlxEngine"


def _read(engine: MlxEngine, read: Callable[[EngineStats], int]) -> float:
    return float(read(engine.stats))


class MlxWorker:
    """The engine, its servicer, and the requests between them."""

    services: Sequence[str] = (SERVICE,)

    def __init__(self, settings: MlxSettings, health: Health, metrics: WorkerMetrics) -> None:
        self._health = health
        self._metrics = metrics
        self._engine = MlxEngine(
            EngineConfig(
                model=settings.model,
                served_name=settings.served_model_name,
                adapter_path=None if settings.adapter_path is None else str(settings.adapter_path),
                prefill_batch_size=settings.prefill_batch_size,
                completion_batch_size=settings.completion_batch_size,
                prefill_step_size=settings.prefill_step_size,
                prefix_cache_bytes=int(settings.prefix_cache_bytes),
                coalesce_s=settings.coalesce_ms / 1000,
                stall_timeout_s=settings.stall_timeout,
            )
        )
        self.generations = Generations(
            health=health,
            metrics=metrics,
            abort_engine=self._engine.abort,
            slots=settings.completion_batch_size,
            max_queued=settings.max_queued_requests,
        )
        self._servicer = MlxServicer(
            self._engine, self.generations, health, max_logprobs=settings.max_logprobs
        )
        self._text: TextInput | None = None
        self._show_engine(metrics.registry)

    def _show_engine(self, registry: CollectorRegistry) -> None:
        """Add what only this engine knows to the metrics port."""
        families: dict[str, tuple[str, Callable[[EngineStats], int]]] = {
            "running_requests": ("Requests in the batch.", lambda stats: stats.running),
            "waiting_requests": ("Requests without a place in it.", lambda stats: stats.waiting),
            "steps": ("Steps since the start.", lambda stats: stats.steps),
            "prefix_cache_entries": (
                "Token sequences kept for reuse.",
                lambda stats: stats.prefix_cache_entries,
            ),
            "prefix_cache_bytes": (
                "Memory that they hold.",
                lambda stats: stats.prefix_cache_bytes,
            ),
        }
        for name, (text, read) in families.items():
            gauge = Gauge(f"smg_mlx_{name}", text, registry=registry)
            gauge.set_function(partial(_read, self._engine, read))

    def register(self, server: grpc.aio.Server) -> None:
        """Add the engine's service to the server."""
        mlx_engine_pb2_grpc.add_MlxEngineServicer_to_server(self._servicer, server)

    async def start(self) -> None:
        """Load the model and warm it up."""
        loaded = await self._engine.start(on_loaded=lambda: self._health.to(State.WARMING))
        self._metrics.set_model(loaded.facts.served_name)
        self._text = TextInput(loaded.tokenizer, loaded.facts.max_context_length)
        self._servicer.model_loaded(loaded.facts, self._text)

    async def died(self) -> EngineDead:
        """Wait for the engine's death."""
        return await self._engine.dead

    async def close(self) -> None:
        """Stop the engine's thread."""
        if self._text is not None:
            self._text.close()
        await self._engine.close()

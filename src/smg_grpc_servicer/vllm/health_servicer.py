"""grpc.health.v1 as vLLM's launcher loads it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from smg_grpc_servicer.serving.health import HealthServicer
from smg_grpc_servicer.vllm.under_launcher import drain
from smg_grpc_servicer.vllm.worker import SERVICE, worker_of

if TYPE_CHECKING:
    from vllm.engine.protocol import EngineClient


class VllmHealthServicer(HealthServicer):
    """The health of the worker that serves an engine client."""

    def __init__(self, engine_client: EngineClient) -> None:
        self._worker = worker_of(engine_client)
        super().__init__(self._worker.health, (SERVICE,))
        self._worker.protect_health(self)

    def set_not_serving(self) -> None:
        """Begin to drain: the launcher was told to stop, and stops the server next."""
        drain(self._worker)

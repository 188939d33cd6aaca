"""The engine's service on a server that is up before its engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from smg_grpc_proto.generated import vllm_engine_pb2_grpc

from smg_grpc_servicer.serving.interceptors import written
from smg_grpc_servicer.vllm.worker import ENGINE_SERVICE
from smg_wire.errors import Unavailable

if TYPE_CHECKING:
    import grpc

    from smg_grpc_servicer.serving.health import Health

    Context = grpc.aio.ServicerContext[Any, Any]


class Gate(vllm_engine_pb2_grpc.VllmEngineServicer):
    """Passes each RPC on to the servicer once there is one; until then it refuses."""

    def __init__(self, health: Health) -> None:
        self._health = health
        self._servicer: object | None = None
        for method in ENGINE_SERVICE.methods:
            setattr(self, method.name, self._passing(method.name))

    def open(self, servicer: object) -> None:
        """Pass RPCs on to this servicer from now on."""
        self._servicer = servicer

    def _passing(self, name: str) -> Any:
        async def passing(request: Any, context: Context) -> Any:
            if self._servicer is None:
                raise self._health.refusal() or Unavailable("the worker is starting")
            return await written(getattr(self._servicer, name))(request, context)

        return passing

"""The RPCs of `vllm.grpc.engine.VllmEngine`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from smg_grpc_proto.generated import vllm_engine_pb2 as pb
from smg_grpc_proto.generated import vllm_engine_pb2_grpc

from smg_grpc_servicer.serving.health import State
from smg_wire.errors import Unavailable

if TYPE_CHECKING:
    import grpc

    from smg_grpc_servicer.serving.health import Health
    from smg_grpc_servicer.vllm.generate import GenerateRpcs

    Context = grpc.aio.ServicerContext[Any, Any]


class VllmEngineServicer(vllm_engine_pb2_grpc.VllmEngineServicer):
    """Thin: each method hands over to the part that answers it."""

    def __init__(self, health: Health, requests: GenerateRpcs | None = None) -> None:
        self._health = health
        self._requests = requests

    def engine_started(self, requests: GenerateRpcs) -> None:
        """Take what runs requests; until then they are refused."""
        self._requests = requests

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> None:
        """Stream the answers to one prompt, or send them whole if `stream` is not set."""
        await self._started().generate(request, context)

    async def Embed(self, request: pb.EmbedRequest, context: Context) -> pb.EmbedResponse:
        """Answer with the vector of one prompt."""
        return await self._started().embed(request, context)

    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:
        """End the live requests of these ids; others are none of its business."""
        return await self._started().abort(request, context)

    async def HealthCheck(
        self, request: pb.HealthCheckRequest, context: Context
    ) -> pb.HealthCheckResponse:
        """Say whether the engine serves, and if not why."""
        del request, context
        if self._health.state is State.SERVING:
            return pb.HealthCheckResponse(healthy=True, message="Health")
        return pb.HealthCheckResponse(healthy=False, message=self._health.state.label)

    def _started(self) -> GenerateRpcs:
        if self._requests is None:
            raise self._health.refusal() or Unavailable("the engine has not started")
        return self._requests

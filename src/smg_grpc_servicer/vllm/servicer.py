"""The RPCs of `vllm.grpc.engine.VllmEngine`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from smg_grpc_proto.generated import common_pb2, vllm_engine_pb2_grpc
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from smg_grpc_servicer.serving.health import State
from smg_grpc_servicer.vllm import admin, info
from smg_grpc_servicer.vllm.generate import GenerateRpcs
from smg_grpc_servicer.vllm.telemetry import TelemetryMethods
from smg_grpc_servicer.vllm.worker import worker_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import grpc
    from vllm.engine.protocol import EngineClient

    Context = grpc.aio.ServicerContext[Any, Any]


class VllmEngineServicer(TelemetryMethods, vllm_engine_pb2_grpc.VllmEngineServicer):
    """Thin: each method validates, converts, runs and converts back.

    Args:
        engine_client: vLLM's AsyncLLM.
        start_time: the `time.time()` at which the process started.
    """

    def __init__(self, engine_client: EngineClient, start_time: float) -> None:
        self._worker = worker = worker_of(engine_client)
        self._description = info.Description(worker, start_time)
        self._flusher = admin.CacheFlusher(engine_client, worker.generations)
        self._profiler = admin.Profiler(engine_client, worker.config)
        self._tokenizer = admin.TokenizerFiles(worker.config)
        self._requests = GenerateRpcs(
            engine_client, worker.bridge, worker.generations, worker.health
        )
        self._loads = worker.loads
        self._kv_events = worker.kv_events
        worker.protect(self)

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> None:
        """Stream the answers to one prompt, or send them whole if `stream` is not set."""
        self._description.received()
        await self._requests.generate(request, context)

    async def Embed(self, request: pb.EmbedRequest, context: Context) -> pb.EmbedResponse:
        """Answer with the vector of one prompt."""
        self._description.received()
        return await self._requests.embed(request, context)

    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:
        """End the live requests of these ids; others are none of its business."""
        return await self._requests.abort(request, context)

    async def HealthCheck(
        self, request: pb.HealthCheckRequest, context: Context
    ) -> pb.HealthCheckResponse:
        """Say whether the engine serves, and if not why."""
        del request, context
        state = self._worker.health.state
        if state is State.SERVING:
            return pb.HealthCheckResponse(healthy=True, message="Health")
        return pb.HealthCheckResponse(healthy=False, message=state.label)

    async def FlushCache(
        self, request: common_pb2.FlushCacheRequest, context: Context
    ) -> common_pb2.FlushCacheResponse:
        """Empty the prefix cache once nothing runs."""
        del context
        return await self._flusher.flush(request)

    async def StartProfile(
        self, request: common_pb2.StartProfileRequest, context: Context
    ) -> common_pb2.ProfileResponse:
        """Start the profiler that vLLM was launched with."""
        del context
        return await self._profiler.start(request)

    async def StopProfile(
        self, request: common_pb2.StopProfileRequest, context: Context
    ) -> common_pb2.ProfileResponse:
        """Stop it, and export its traces."""
        del request, context
        return await self._profiler.stop()

    async def GetModelInfo(
        self, request: pb.GetModelInfoRequest, context: Context
    ) -> pb.GetModelInfoResponse:
        """Describe the model."""
        del request, context
        return await self._description.model()

    async def GetServerInfo(
        self, request: pb.GetServerInfoRequest, context: Context
    ) -> pb.GetServerInfoResponse:
        """Describe the worker, and what it is doing."""
        del request, context
        return await self._description.server()

    async def GetTokenizer(
        self, request: common_pb2.GetTokenizerRequest, context: Context
    ) -> AsyncIterator[common_pb2.GetTokenizerChunk]:
        """Stream the tokenizer's files as a zip."""
        del request, context
        async for chunk in self._tokenizer.chunks():
            yield chunk

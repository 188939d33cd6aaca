"""The six RPCs of `mlx.grpc.engine.MlxEngine`."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smg_grpc_proto.generated import common_pb2, mlx_engine_pb2_grpc
from smg_grpc_proto.generated import mlx_engine_pb2 as pb

from smg_grpc_servicer.mlx import info, requests, responses
from smg_grpc_servicer.serving.health import State
from smg_wire import tokenizer_bundle

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    import grpc

    from smg_grpc_servicer.mlx.engine import MlxEngine
    from smg_grpc_servicer.mlx.model import ModelFacts
    from smg_grpc_servicer.mlx.text import TextInput
    from smg_grpc_servicer.serving.generation import Generations
    from smg_grpc_servicer.serving.health import Health
    from smg_wire.tokenizer_bundle import Bundle

    Context = grpc.aio.ServicerContext[Any, Any]


class MlxServicer(mlx_engine_pb2_grpc.MlxEngineServicer):
    """Thin: each method validates, converts, runs and converts back."""

    def __init__(
        self, engine: MlxEngine, generations: Generations, health: Health, *, max_logprobs: int
    ) -> None:
        self._engine = engine
        self._generations = generations
        self._health = health
        self._max_logprobs = max_logprobs
        self._started = time.monotonic()
        self._facts: ModelFacts | None = None
        self._text: TextInput | None = None
        self._bundle: asyncio.Future[Bundle] | None = None

    def model_loaded(self, facts: ModelFacts, text: TextInput) -> None:
        """Take what is known once the model is loaded; until then requests are refused."""
        self._facts, self._text = facts, text

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> None:
        """Stream the answer to one prompt, or send it whole if `stream` is not set."""
        facts, text = self._loaded()
        requests.check_has_input(request)
        if request.WhichOneof("input") == "text":
            prompt_ids: Sequence[int] = await text.encode(request.text)
        else:
            prompt_ids = request.tokenized.input_ids
        plan = requests.convert(request, prompt_ids, facts, max_logprobs=self._max_logprobs)
        async with self._generations.open(request.request_id) as generation:
            self._engine.submit(generation.engine_id, plan, generation)
            if not request.stream:
                for delta in await generation.collect():
                    await context.write(responses.complete(delta, with_tokens=True))
                return
            async for delta in generation:
                if delta.token_ids:
                    await context.write(responses.chunk(delta))
                if delta.finish is not None:
                    await context.write(responses.complete(delta, with_tokens=False))

    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:
        """End the live requests of these ids; others are none of its business."""
        del context
        self._generations.abort(request.request_ids)
        return pb.AbortResponse()

    async def HealthCheck(
        self, request: pb.HealthCheckRequest, context: Context
    ) -> pb.HealthCheckResponse:
        """Say whether the engine serves, and if not why."""
        del request, context
        if self._health.state is State.SERVING:
            return pb.HealthCheckResponse(healthy=True, message="OK")
        return pb.HealthCheckResponse(healthy=False, message=self._health.state.label)

    async def GetModelInfo(
        self, request: pb.GetModelInfoRequest, context: Context
    ) -> pb.GetModelInfoResponse:
        """Describe the model."""
        del request, context
        return info.model_info(self._loaded()[0])

    async def GetServerInfo(
        self, request: pb.GetServerInfoRequest, context: Context
    ) -> pb.GetServerInfoResponse:
        """Describe the worker."""
        del request, context
        return info.server_info(active_requests=self._generations.in_flight, started=self._started)

    async def GetTokenizer(
        self, request: common_pb2.GetTokenizerRequest, context: Context
    ) -> AsyncIterator[common_pb2.GetTokenizerChunk]:
        """Stream the tokenizer's files as a zip."""
        del request, context
        facts, _ = self._loaded()
        if self._bundle is None or (self._bundle.done() and self._bundle.exception() is not None):
            pack = asyncio.to_thread(tokenizer_bundle.pack, Path(facts.model_path))
            self._bundle = asyncio.ensure_future(pack)
        # Shielded: one caller that leaves must not cancel the packing for the others.
        bundle = await asyncio.shield(self._bundle)
        for data, sha256 in bundle.chunks():
            yield common_pb2.GetTokenizerChunk(data=data, sha256=sha256)

    def _loaded(self) -> tuple[ModelFacts, TextInput]:
        refusal = self._health.refusal() if self._facts is None else None
        if refusal is not None:
            raise refusal
        assert self._facts is not None  # noqa: S101  (SERVING comes after model_loaded)
        assert self._text is not None  # noqa: S101
        return self._facts, self._text

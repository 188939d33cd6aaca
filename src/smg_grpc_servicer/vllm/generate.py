"""Generate, Embed and Abort: validate, convert, run, convert back."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from smg_grpc_servicer.serving.text import TextInput
from smg_grpc_servicer.vllm import limits as engine_limits
from smg_grpc_servicer.vllm import requests, responses
from smg_grpc_servicer.vllm.outputs import Embedding
from smg_wire.errors import Unavailable
from smg_wire.observability import trace_headers

if TYPE_CHECKING:
    import grpc

    from smg_grpc_servicer.serving.generation import Generations
    from smg_grpc_servicer.serving.health import Health
    from smg_grpc_servicer.vllm.bridge import EngineBridge

    Context = grpc.aio.ServicerContext[Any, Any]


class GenerateRpcs:
    """The RPCs that run requests, on one engine client that has started.

    `generations` must have been made with the `abort` of this `bridge`, as one that speaks last.
    """

    def __init__(
        self, engine_client: Any, bridge: EngineBridge, generations: Generations, health: Health
    ) -> None:
        self._bridge = bridge
        self._generations = generations
        self._health = health
        self._limits = engine_limits.read(engine_client)
        self._text = _text_input(engine_client, self._limits.context)

    async def generate(self, request: pb.GenerateRequest, context: Context) -> None:
        """Stream the answers to one prompt, or send them whole if `stream` is not set."""
        self._refuse_unless_serving()
        ids = await requests.prompt_ids(request, self._limits, self._text)
        plan = requests.generation(request, ids, self._limits)
        async with self._generations.open(request.request_id, choices=plan.choices) as generation:
            await self._bridge.submit(generation, plan, trace_headers=trace_headers())
            if not request.stream:
                for delta in await generation.collect():
                    await context.write(responses.complete(delta, chunked=False))
                return
            async for delta in generation:
                if delta.token_ids:
                    await context.write(responses.chunk(delta))
                if delta.finish is not None:
                    await context.write(responses.complete(delta, chunked=bool(delta.token_ids)))

    async def embed(self, request: pb.EmbedRequest, context: Context) -> pb.EmbedResponse:
        """Answer with the vector of one prompt."""
        del context
        self._refuse_unless_serving()
        plan = requests.embedding(request, self._limits)
        async with self._generations.open(request.request_id) as generation:
            await self._bridge.submit(generation, plan, trace_headers=trace_headers())
            (delta,) = await generation.collect()
        if not isinstance(delta.extra, Embedding):
            # There is no such thing as a part of a vector.
            raise Unavailable("the request was aborted")
        return responses.embedding(delta.extra.values, delta.prompt_tokens)

    async def abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:
        """End the live requests of these ids; others are none of its business."""
        del context
        self._generations.abort(request.request_ids)
        return pb.AbortResponse()

    def close(self) -> None:
        """Stop what tokenizes text."""
        self._text.close()

    def _refuse_unless_serving(self) -> None:
        refusal = self._health.refusal()
        if refusal is not None:
            raise refusal


def _text_input(engine_client: Any, context: int) -> TextInput:
    """Return what encodes text as vLLM's completions do: special tokens are added."""
    tokenizer = getattr(engine_client, "tokenizer", None)
    own: list[Any] = []

    def encode(text: str) -> list[int]:
        if not own:
            # vLLM's threads use the original, which bears one user at a time.
            own.append(copy.deepcopy(tokenizer))
        return list(own[0].encode(text, add_special_tokens=True))

    longest = 1 if tokenizer is None else max(map(len, tokenizer.get_vocab()))
    return TextInput(encode, context=context, longest_token=longest)

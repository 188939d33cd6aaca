"""vLLM's wire in the words of the conformance suite."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from smg_grpc_proto.generated import common_pb2, vllm_engine_pb2_grpc
from smg_grpc_proto.generated import vllm_engine_pb2 as pb
from tests.conformance.driver import Call, Chunk, Client, Complete, TokenLogprobs

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    import grpc
    from tests.conformance.driver import Event, Metadata, Params

SERVICE = "vllm.grpc.engine.VllmEngine"


class VllmCall(Call):
    """This wire counts a message's own tokens and repeats the last chunk at the end; the suite
    counts the choice's, each once. What is translated is checked on the way."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self._events = self._read()

    def __aiter__(self) -> AsyncIterator[Event]:
        return self._events

    def cancel(self) -> None:
        self._call.cancel()

    async def _read(self) -> AsyncIterator[Event]:
        counts: dict[int, int] = {}
        last: dict[int, pb.GenerateStreamChunk] = {}
        async for response in self._call:
            if response.WhichOneof("response") == "chunk":
                chunk = response.chunk
                last[chunk.index] = chunk
                counts[chunk.index] = counts.get(chunk.index, 0) + chunk.completion_tokens
                assert chunk.completion_tokens == len(chunk.token_ids)
                yield Chunk(
                    chunk.index, list(chunk.token_ids), *_counts(chunk, counts[chunk.index])
                )
            else:
                yield self._end(response.complete, counts, last)

    def _end(
        self,
        end: pb.GenerateComplete,
        counts: dict[int, int],
        last: dict[int, pb.GenerateStreamChunk],
    ) -> Complete:
        ids = list(end.output_ids)
        assert end.completion_tokens == len(ids)
        chunk = last.get(end.index)
        count, (_, _, _, logprobs) = len(ids), _counts(end, 0)
        if chunk is not None:
            if ids:
                assert ids == list(chunk.token_ids), "the end repeats the last chunk"
                assert end.output_logprobs == chunk.output_logprobs
            ids, count, logprobs = [], counts[end.index], None
        matched = end.WhichOneof("matched_stop")
        return Complete(
            end.index,
            ids,
            end.prompt_tokens,
            count,
            end.cached_tokens,
            logprobs,
            finish_reason=end.finish_reason,
            matched=None if matched is None else getattr(end, matched),
        )


def _counts(message: Any, count: int) -> tuple[int, int, int, TokenLogprobs | None]:
    logprobs = None
    if message.HasField("output_logprobs"):
        given = message.output_logprobs
        ids = list(given.token_ids)
        assert len(ids) == len(given.token_logprobs)
        # No alternatives asked for, no list of them.
        tops = [list(zip(top.token_ids, top.values, strict=True)) for top in given.top_logprobs]
        assert len(tops) in (0, len(ids))
        logprobs = TokenLogprobs(ids, list(given.token_logprobs), tops or [[] for _ in ids])
    return message.prompt_tokens, count, message.cached_tokens, logprobs


class VllmClient(Client):
    def __init__(self, channel: grpc.aio.Channel, metadata: Metadata = ()) -> None:
        self.stub: Any = vllm_engine_pb2_grpc.VllmEngineStub(channel)
        self._metadata = metadata

    def generate(
        self,
        prompt_ids: Sequence[int],
        params: Params,
        *,
        stream: bool = True,
        request_id: str = "",
        timeout: float | None = None,
    ) -> Call:
        request = pb.GenerateRequest(
            request_id=request_id,
            tokenized=pb.TokenizedInput(input_ids=prompt_ids),
            sampling_params=sampling(params),
            stream=stream,
        )
        return VllmCall(self.stub.Generate(request, timeout=timeout, metadata=self._metadata))

    def send(self, request: Any) -> Call:
        return VllmCall(self.stub.Generate(request, metadata=self._metadata))

    async def abort(self, request_id: str) -> bool | None:
        request = pb.AbortRequest(request_ids=[request_id])
        response = await self.stub.Abort(request, metadata=self._metadata)
        assert response == pb.AbortResponse()
        return None

    async def active(self) -> int:
        request = pb.GetServerInfoRequest()
        info = await self.stub.GetServerInfo(request, metadata=self._metadata)
        return int(info.active_requests)

    async def healthy(self) -> bool:
        request = pb.HealthCheckRequest()
        return bool((await self.stub.HealthCheck(request, metadata=self._metadata)).healthy)

    async def served_model_name(self) -> str:
        request = pb.GetModelInfoRequest()
        info = await self.stub.GetModelInfo(request, metadata=self._metadata)
        return str(info.served_model_name)

    async def tokenizer(self) -> list[tuple[bytes, str]]:
        call = self.stub.GetTokenizer(common_pb2.GetTokenizerRequest(), metadata=self._metadata)
        return [(chunk.data, chunk.sha256) async for chunk in call]


def sampling(params: Params) -> pb.SamplingParams:
    return pb.SamplingParams(
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty,
        frequency_penalty=params.frequency_penalty,
        presence_penalty=params.presence_penalty,
        logit_bias=params.logit_bias,
        max_tokens=params.max_tokens,
        stop=params.stop,
        stop_token_ids=params.stop_token_ids,
        ignore_eos=params.ignore_eos,
        logprobs=params.logprobs,
        seed=params.seed,
        n=params.n,
        skip_special_tokens=True,
        spaces_between_special_tokens=True,
    )

"""MLX's wire in the words of the conformance suite."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from smg_grpc_proto.generated import common_pb2, mlx_engine_pb2_grpc
from smg_grpc_proto.generated import mlx_engine_pb2 as pb
from tests.conformance.driver import Call, Chunk, Client, Complete, Refusal, TokenLogprobs

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    import grpc
    from tests.conformance.driver import Event, Facts, Metadata, Params

SERVICE = "mlx.grpc.engine.MlxEngine"


class MlxCall(Call):
    def __init__(self, call: Any) -> None:
        self._call = call
        self._events = self._read()

    def __aiter__(self) -> AsyncIterator[Event]:
        return self._events

    def cancel(self) -> None:
        self._call.cancel()

    async def _read(self) -> AsyncIterator[Event]:
        async for response in self._call:
            yield _event(response)


def _event(response: pb.GenerateResponse) -> Event:
    kind = response.WhichOneof("response")
    if kind == "chunk":
        message = response.chunk
        return Chunk(_index(message), list(message.token_ids), *_counts(message))
    assert kind == "complete"
    end = response.complete
    return Complete(
        _index(end),
        list(end.output_ids),
        *_counts(end),
        finish_reason=end.finish_reason,
        matched=end.matched_stop_token_id if end.HasField("matched_stop_token_id") else None,
    )


def _index(message: Any) -> int:
    return int(message.index)


def _counts(message: Any) -> tuple[int, int, int, TokenLogprobs | None]:
    logprobs = None
    if message.HasField("output_logprobs"):
        given = message.output_logprobs
        tops = [list(zip(top.token_ids, top.values, strict=True)) for top in given.top_logprobs]
        assert len(given.token_ids) == len(given.token_logprobs)
        logprobs = TokenLogprobs(list(given.token_ids), list(given.token_logprobs), tops)
    return message.prompt_tokens, message.completion_tokens, message.cached_tokens, logprobs


class MlxClient(Client):
    def __init__(self, channel: grpc.aio.Channel, metadata: Metadata = ()) -> None:
        self._stub: Any = mlx_engine_pb2_grpc.MlxEngineStub(channel)
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
        return MlxCall(self._stub.Generate(request, timeout=timeout, metadata=self._metadata))

    def send(self, request: Any) -> Call:
        return MlxCall(self._stub.Generate(request, metadata=self._metadata))

    async def abort(self, request_id: str) -> bool | None:
        request = pb.AbortRequest(request_ids=[request_id])
        response = await self._stub.Abort(request, metadata=self._metadata)
        assert response == pb.AbortResponse()
        return None

    async def active(self) -> int:
        request = pb.GetServerInfoRequest()
        info = await self._stub.GetServerInfo(request, metadata=self._metadata)
        return int(info.active_requests)

    async def healthy(self) -> bool:
        request = pb.HealthCheckRequest()
        return bool((await self._stub.HealthCheck(request, metadata=self._metadata)).healthy)

    async def served_model_name(self) -> str:
        request = pb.GetModelInfoRequest()
        info = await self._stub.GetModelInfo(request, metadata=self._metadata)
        return str(info.served_model_name)

    async def tokenizer(self) -> list[tuple[bytes, str]]:
        call = self._stub.GetTokenizer(common_pb2.GetTokenizerRequest(), metadata=self._metadata)
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
        stop_token_ids=params.stop_token_ids,
        ignore_eos=params.ignore_eos,
        logprobs=params.logprobs,
        seed=params.seed,
    )


@dataclass(frozen=True)
class _Bad:
    """A value of one sampling parameter, how a refusal shows it, and the limit it names."""

    field: str
    value: Any
    shown: str
    limit: str


def refusals(facts: Facts, *, most_logprobs: int) -> list[Refusal]:
    """Every field of the wire beyond each of its bounds."""
    last = str(facts.vocabulary - 1)
    beyond, top = facts.vocabulary, 2**32 - 1
    bad = [
        _Bad("temperature", -0.1, "-0.1", "at least 0"),
        _Bad("top_p", 1.01, "1.01", "[0, 1]"),
        _Bad("top_p", -0.01, "-0.01", "[0, 1]"),
        _Bad("min_p", 1.01, "1.01", "[0, 1]"),
        _Bad("min_p", -0.01, "-0.01", "[0, 1]"),
        _Bad("repetition_penalty", -0.1, "-0.1", "at least 0"),
        _Bad("frequency_penalty", 2.01, "2.01", "[-2, 2]"),
        _Bad("frequency_penalty", -2.01, "-2.01", "[-2, 2]"),
        _Bad("presence_penalty", 2.01, "2.01", "[-2, 2]"),
        _Bad("presence_penalty", -2.01, "-2.01", "[-2, 2]"),
        _Bad("max_tokens", 0, "0", "at least 1"),
        _Bad("logprobs", -1, "-1", f"[0, {most_logprobs}]"),
        _Bad("logprobs", most_logprobs + 1, str(most_logprobs + 1), f"[0, {most_logprobs}]"),
        _Bad("seed", -1, "-1", "0"),
        _Bad("seed", -(2**31), str(-(2**31)), "0"),
        _Bad("stop_token_ids", [beyond], str(beyond), last),
        _Bad("stop_token_ids", [1, top], str(top), last),
        _Bad("logit_bias", {beyond: 1.0}, str(beyond), last),
        _Bad("logit_bias", {-1: 1.0}, "-1", last),
        _Bad("logit_bias", {5: 100.5}, "100.5", "[-100, 100]"),
        _Bad("logit_bias", {5: -100.5}, "-100.5", "[-100, 100]"),
    ]
    floats = ["temperature", "top_p", "min_p", "repetition_penalty"]
    floats += ["frequency_penalty", "presence_penalty"]
    for value in (math.nan, math.inf, -math.inf):
        bad += [_Bad(name, value, repr(value), "must be") for name in floats]
        bad.append(_Bad("logit_bias", {5: value}, repr(value), "[-100, 100]"))
    ids = list(facts.prompts[0])
    table = [
        Refusal(
            f"{case.field}={case.value}",
            pb.GenerateRequest(
                tokenized=pb.TokenizedInput(input_ids=ids),
                sampling_params=pb.SamplingParams(
                    **{"temperature": 1.0, "max_tokens": 4, case.field: case.value}
                ),
                stream=True,
            ),
            (f"sampling_params.{case.field}", case.shown, case.limit),
        )
        for case in bad
    ]
    context = facts.context
    prompts: list[tuple[str, list[int], tuple[str, ...]]] = [
        ("empty", [], ("at least one",)),
        ("full", [ids[0]] * context, (str(context), "context")),
        ("longer", [ids[0]] * (context + 1), (str(context + 1), str(context))),
        ("beyond", [*ids, beyond], (f"[{len(ids)}]", str(beyond), last)),
        ("far beyond", [top], ("[0]", str(top), last)),
    ]
    table += [
        Refusal(
            f"prompt {name}",
            pb.GenerateRequest(
                tokenized=pb.TokenizedInput(input_ids=prompt),
                sampling_params=pb.SamplingParams(max_tokens=4),
                stream=True,
            ),
            ("tokenized.input_ids", *words),
        )
        for name, prompt, words in prompts
    ]
    table.append(Refusal("no input", pb.GenerateRequest(), ("input", "tokenized", "text")))
    return table

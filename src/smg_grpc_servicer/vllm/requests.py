"""GenerateRequest and EmbedRequest -> what vLLM runs; what it could choke on stops here.

A zero that the wire cannot tell from unset (`top_p`, `repetition_penalty`), and an absent
`temperature` or `max_tokens`, are what the model's generation config says, and where that says
nothing the wire's default.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from smg_grpc_servicer.serving import checks
from smg_grpc_servicer.vllm import constraints
from smg_grpc_servicer.vllm.errors import from_vllm
from smg_grpc_servicer.vllm.limits import (
    LEAST_TEMPERATURE,
    MAX_STOP_CHARACTERS,
    MAX_STOP_STRINGS,
)
from smg_wire.errors import (
    EngineRefusal,
    FailedPrecondition,
    InvalidRequest,
    UnsupportedField,
)

if TYPE_CHECKING:
    from smg_grpc_proto.generated import vllm_engine_pb2 as pb

    from smg_grpc_servicer.serving.text import TextInput
    from smg_grpc_servicer.vllm.constraints import Constraint
    from smg_grpc_servicer.vllm.limits import Limits

_FIELD = "sampling_params.{}".format


@dataclass(frozen=True)
class Plan:
    """One checked request: `params` are vLLM's SamplingParams or PoolingParams.

    `named_stops` are the stop token ids that the caller named; others (a second end-of-turn
    token of the model's) end an answer without being a match.
    """

    prompt_ids: list[int]
    params: Any
    choices: int = 1
    named_stops: frozenset[int] = frozenset()
    constraint: Constraint | None = None
    data_parallel_rank: int | None = None
    moves_kv: bool = False
    streams: bool = False


async def prompt_ids(request: pb.GenerateRequest, limits: Limits, text: TextInput) -> list[int]:
    """Return the prompt: the message's ids or its text's, truncated and then checked.

    Raises:
        InvalidRequest: there is none, or it does not fit the model.
        UnsupportedField: it is text, and the engine runs without a tokenizer.
        Overloaded: too many texts wait for the tokenizer.
    """
    kind = request.WhichOneof("input")
    if kind is None:
        raise InvalidRequest("input", None, "set tokenized or text")
    _refuse_media(request)
    most = _truncation(request.sampling_params, limits)
    if kind == "text":
        if not limits.has_tokenizer:
            raise UnsupportedField("text", "this worker runs without a tokenizer")
        side = "left" if limits.keeps_left else "right"
        ids = await text.encode(request.text, keep=None if most is None else side)
    else:
        ids = list(request.tokenized.input_ids)
    if most is not None and len(ids) > most:
        ids = ids[:most] if limits.keeps_left else ids[-most:]
    field = "text" if kind == "text" else "tokenized.input_ids"
    return checks.prompt_ids(field, ids, vocab_size=limits.vocab_size, context=limits.context)


def _refuse_media(request: pb.GenerateRequest) -> None:
    for field in ("mm_inputs", "media_refs"):
        if request.HasField(field):
            raise UnsupportedField(field, "this worker takes token ids and text alone")
    if request.extra_mm_inputs:
        raise UnsupportedField("extra_mm_inputs", "this worker takes token ids and text alone")


def _truncation(params: pb.SamplingParams, limits: Limits) -> int | None:
    """Return the most tokens to keep of a prompt; -1 is what leaves room for one of the answer."""
    if not params.HasField("truncate_prompt_tokens"):
        return None
    value: int = params.truncate_prompt_tokens
    if value == -1:
        return limits.context - 1
    if not 1 <= value <= limits.context:
        raise InvalidRequest(
            _FIELD("truncate_prompt_tokens"), value, f"must be -1 or in [1, {limits.context}]"
        )
    return value


def generation(request: pb.GenerateRequest, ids: list[int], limits: Limits) -> Plan:
    """Return the plan of a Generate call whose prompt is `ids`.

    Raises:
        InvalidRequest: names the field, the value and the limit.
        UnsupportedField: this engine cannot honour a field that is set.
        FailedPrecondition: the request needs a KV connector, and there is none.
        EngineRefusal: vLLM itself refuses the combination.
    """
    if not limits.generates:
        raise EngineRefusal("this model does not support generation: it is served for pooling")
    params = request.sampling_params
    constraint = constraints.read(params, limits)
    moved = _kv_transfer_params(request, limits)
    values = _sampling(params, limits)
    values |= _stops(params, limits)
    values |= _lengths(params, limits, len(ids))
    values |= _logprobs(params, limits)
    if moved:
        values["extra_args"] = {"kv_transfer_params": moved}
    if constraint is not None:
        values["structured_outputs"] = constraints.build(constraint)
    return Plan(
        prompt_ids=ids,
        params=_sampling_params(values, stream=request.stream),
        choices=values["n"],
        named_stops=frozenset(params.stop_token_ids),
        constraint=constraint,
        data_parallel_rank=_rank(request, limits),
        moves_kv=bool(moved),
        streams=request.stream,
    )


def embedding(request: pb.EmbedRequest, limits: Limits) -> Plan:
    """Return the plan of an Embed call.

    Raises:
        InvalidRequest: there are no token ids, or they do not fit the model.
        EngineRefusal: the model is not served for pooling.
    """
    if not request.HasField("tokenized"):
        raise InvalidRequest("tokenized", None, "set token ids")
    if limits.generates:
        raise EngineRefusal("this model does not support pooling: it is served for generation")
    ids = checks.prompt_ids(
        "tokenized.input_ids",
        list(request.tokenized.input_ids),
        vocab_size=limits.vocab_size,
        context=limits.context,
        answers=False,
    )
    from vllm import PoolingParams

    return Plan(prompt_ids=ids, params=PoolingParams(task="embed"))


def _sampling(params: pb.SamplingParams, limits: Limits) -> dict[str, Any]:
    default = limits.default_sampling
    bias = checks.logit_bias(_FIELD("logit_bias"), params.logit_bias, vocab_size=limits.vocab_size)
    min_p = checks.number(_FIELD("min_p"), params.min_p, 0.0, 1.0)
    if limits.speculative:
        for field, value in (("logit_bias", bias), ("min_p", min_p)):
            if value:
                raise UnsupportedField(_FIELD(field), "this engine decodes speculatively")
    return {
        "n": checks.integer(_FIELD("n"), params.n, 0, limits.most_choices) or 1,
        "temperature": _temperature(params, limits),
        "top_p": checks.top_p(_FIELD("top_p"), params.top_p or default.get("top_p", 0.0)),
        # The field is unsigned: whatever reaches the whole vocabulary leaves nothing out.
        "top_k": params.top_k if params.top_k < limits.vocab_size else 0,
        "min_p": min_p,
        "repetition_penalty": checks.repetition_penalty(
            _FIELD("repetition_penalty"),
            params.repetition_penalty or default.get("repetition_penalty", 0.0),
        ),
        "frequency_penalty": checks.penalty(_FIELD("frequency_penalty"), params.frequency_penalty),
        "presence_penalty": checks.penalty(_FIELD("presence_penalty"), params.presence_penalty),
        "logit_bias": bias or None,
        # vLLM makes -1 a random seed, and takes any other.
        "seed": params.seed if params.HasField("seed") else None,
    }


def _temperature(params: pb.SamplingParams, limits: Limits) -> float:
    if params.HasField("temperature"):
        most = math.inf if limits.most_temperature is None else limits.most_temperature
        value = checks.number(_FIELD("temperature"), params.temperature, 0.0, most)
    else:
        value = limits.default_sampling.get("temperature", checks.DEFAULT_TEMPERATURE)
    return max(value, LEAST_TEMPERATURE) if value else 0.0


def _stops(params: pb.SamplingParams, limits: Limits) -> dict[str, Any]:
    stop = checks.stop_strings(
        _FIELD("stop"), params.stop, most=MAX_STOP_STRINGS, most_characters=MAX_STOP_CHARACTERS
    )
    if stop and not limits.has_tokenizer:
        raise UnsupportedField(_FIELD("stop"), "this worker runs without a tokenizer")
    ids = list(params.stop_token_ids)
    checks.token_ids(_FIELD("stop_token_ids"), ids, vocab_size=limits.vocab_size)
    return {
        "stop": stop,
        "stop_token_ids": ids,
        "ignore_eos": params.ignore_eos,
        "include_stop_str_in_output": params.include_stop_str_in_output,
        "skip_special_tokens": params.skip_special_tokens,
        "spaces_between_special_tokens": params.spaces_between_special_tokens,
        # Only ids go over the wire: text is made where stop strings are looked for in it.
        "detokenize": bool(stop),
    }


def _lengths(params: pb.SamplingParams, limits: Limits, prompt_tokens: int) -> dict[str, Any]:
    asked = params.max_tokens if params.HasField("max_tokens") else None
    most = checks.max_tokens(
        _FIELD("max_tokens"),
        limits.default_sampling.get("max_tokens") if asked is None else asked,
        prompt_tokens=prompt_tokens,
        context=limits.context,
    )
    if params.min_tokens > most:
        raise InvalidRequest(
            _FIELD("min_tokens"), params.min_tokens, f"must be at most {most}, the most to generate"
        )
    return {"max_tokens": most, "min_tokens": params.min_tokens}


def _logprobs(params: pb.SamplingParams, limits: Limits) -> dict[str, Any]:
    if params.HasField("prompt_logprobs") and not limits.prompt_logprobs:
        raise UnsupportedField(
            _FIELD("prompt_logprobs"), "this engine runs with --kv-sharing-fast-prefill"
        )
    values: dict[str, Any] = {
        "logprobs": _alternatives("logprobs", params, limits),
        "prompt_logprobs": _alternatives("prompt_logprobs", params, limits),
    }
    # A few lists instead of an object for each alternative.
    values["flat_logprobs"] = any(value is not None for value in values.values())
    return values


def _alternatives(name: str, params: pb.SamplingParams, limits: Limits) -> int | None:
    if not params.HasField(name):
        return None
    value: int = getattr(params, name)
    if value == -1:
        if not limits.all_logprobs:
            raise InvalidRequest(
                _FIELD(name), value, f"must be in [0, {limits.most_logprobs}] (--max-logprobs)"
            )
        return value
    return checks.integer(_FIELD(name), value, 0, limits.most_logprobs)


def _rank(request: pb.GenerateRequest, limits: Limits) -> int | None:
    if not request.HasField("data_parallel_rank"):
        return None
    return checks.integer(
        "data_parallel_rank", request.data_parallel_rank, 0, limits.data_parallel_ranks - 1
    )


def _kv_transfer_params(request: pb.GenerateRequest, limits: Limits) -> dict[str, Any]:
    """Return what a KV connector is to be given; the JSON form is preferred to the typed one."""
    if request.HasField("kv_transfer_params_json"):
        field = "kv_transfer_params_json"
        params = checks.json_object(field, request.kv_transfer_params_json)
    elif request.HasField("kv_transfer_params"):
        field, typed = "kv_transfer_params", request.kv_transfer_params
        params = {"remote_host": typed.remote_host, "remote_port": typed.remote_port}
    else:
        return {}
    if params and not limits.kv_connector:
        raise FailedPrecondition(f"{field}: this worker runs no KV connector")
    return params


def _sampling_params(values: dict[str, Any], *, stream: bool) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    kind = RequestOutputKind.DELTA if stream else RequestOutputKind.FINAL_ONLY
    try:
        # Nobody else holds them: vLLM need not copy them in depth.
        return SamplingParams(**values, output_kind=kind, skip_clone=True)
    except Exception as error:
        refusal = from_vllm(error)
        if refusal is None:
            raise
        raise EngineRefusal(f"sampling_params: {refusal.message}") from error

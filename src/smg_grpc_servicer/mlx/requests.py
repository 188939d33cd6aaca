"""GenerateRequest -> what the MLX engine runs; everything the engine could choke on stops here."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from smg_grpc_servicer.mlx.config import MlxRequest
from smg_grpc_servicer.mlx.sampling import Sampling
from smg_grpc_servicer.serving import checks
from smg_wire.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from smg_grpc_proto.generated import mlx_engine_pb2 as pb

    from smg_grpc_servicer.mlx.model import ModelFacts

# The wire's seed is an int32, and MLX's keys take no negative one.
_MAX_SEED = 2**31 - 1


def convert(
    request: pb.GenerateRequest, prompt_ids: Sequence[int], facts: ModelFacts, *, max_logprobs: int
) -> MlxRequest:
    """Return the checked request; `prompt_ids` are the message's own, or its text's.

    Raises:
        InvalidRequest: names the field, the value and the limit.
    """
    vocab_size, context = facts.vocab_size, facts.max_context_length
    field = "text" if request.WhichOneof("input") == "text" else "tokenized.input_ids"
    prompt = checks.prompt_ids(field, prompt_ids, vocab_size=vocab_size, context=context)
    params = request.sampling_params
    return MlxRequest(
        prompt_ids=prompt,
        sampling=_sampling(params, vocab_size),
        max_tokens=checks.max_tokens(
            "sampling_params.max_tokens",
            params.max_tokens if params.HasField("max_tokens") else None,
            prompt_tokens=len(prompt),
            context=context,
        ),
        stop_token_ids=_stop_token_ids(params, facts),
        logprobs=_logprobs(params, max_logprobs),
    )


def check_has_input(request: pb.GenerateRequest) -> None:
    """Refuse a request without a prompt.

    An empty text is none, whatever the model's tokenizer would put in front of it.

    Raises:
        InvalidRequest: neither `tokenized` nor `text` is set, or the text is empty.
    """
    kind = request.WhichOneof("input")
    if kind is None:
        raise InvalidRequest("input", None, "set tokenized or text")
    if kind == "text" and not request.text:
        raise InvalidRequest("text", request.text, "must not be empty")


def _sampling(params: pb.SamplingParams, vocab_size: int) -> Sampling:
    name = "sampling_params.{}".format
    temperature = checks.DEFAULT_TEMPERATURE
    if params.HasField("temperature"):
        temperature = checks.number(name("temperature"), params.temperature, 0.0, math.inf)
    return Sampling(
        temperature=temperature,
        top_p=checks.top_p(name("top_p"), params.top_p),
        # The field is unsigned: whatever reaches the whole vocabulary leaves nothing out.
        top_k=params.top_k if params.top_k < vocab_size else 0,
        min_p=checks.number(name("min_p"), params.min_p, 0.0, 1.0),
        repetition_penalty=checks.repetition_penalty(
            name("repetition_penalty"), params.repetition_penalty
        ),
        frequency_penalty=checks.penalty(name("frequency_penalty"), params.frequency_penalty),
        presence_penalty=checks.penalty(name("presence_penalty"), params.presence_penalty),
        logit_bias=checks.logit_bias(name("logit_bias"), params.logit_bias, vocab_size=vocab_size),
        seed=(
            checks.integer(name("seed"), params.seed, 0, _MAX_SEED)
            if params.HasField("seed")
            else None
        ),
    )


def _stop_token_ids(params: pb.SamplingParams, facts: ModelFacts) -> frozenset[int]:
    stops = checks.stop_token_ids(
        "sampling_params.stop_token_ids", params.stop_token_ids, vocab_size=facts.vocab_size
    )
    return stops if params.ignore_eos else stops.union(facts.eos_token_ids)


def _logprobs(params: pb.SamplingParams, most: int) -> int | None:
    if not params.HasField("logprobs"):
        return None
    return checks.integer("sampling_params.logprobs", params.logprobs, 0, most)

"""GenerateRequest -> MlxRequest: what the wire leaves out, and what is refused by name."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest
from smg_grpc_proto.generated import mlx_engine_pb2 as pb

from smg_grpc_servicer.mlx import requests
from smg_grpc_servicer.mlx.model import ModelFacts
from smg_wire.errors import InvalidRequest

if TYPE_CHECKING:
    from smg_grpc_servicer.mlx.config import MlxRequest

VOCABULARY = 100
CONTEXT = 32
FACTS = ModelFacts(
    model_path="/models/tiny",
    served_name="tiny",
    model_type="llama",
    architectures=("LlamaForCausalLM",),
    vocab_size=VOCABULARY,
    max_context_length=CONTEXT,
    eos_token_ids=(2, 3),
    pad_token_id=None,
    bos_token_id=1,
)


def convert(ids: list[int] | None = None, **params: Any) -> MlxRequest:
    ids = [5, 6, 7] if ids is None else ids
    request = pb.GenerateRequest(
        tokenized=pb.TokenizedInput(input_ids=ids), sampling_params=pb.SamplingParams(**params)
    )
    return requests.convert(request, ids, FACTS, max_logprobs=20)


def test_an_absent_sampling_params_is_all_of_them_absent() -> None:
    request = pb.GenerateRequest(tokenized=pb.TokenizedInput(input_ids=[5]))
    plan = requests.convert(request, [5], FACTS, max_logprobs=20)
    assert plan.sampling.temperature == 1.0
    assert plan.sampling.top_p == 1.0
    assert plan.sampling.top_k == 0
    assert plan.sampling.repetition_penalty == 1.0
    assert plan.sampling.seed is None
    assert plan.logprobs is None
    assert plan.max_tokens == CONTEXT - 1
    assert plan.stop_token_ids == {2, 3}


def test_an_explicit_zero_is_a_value_where_the_field_can_be_absent() -> None:
    plan = convert(temperature=0.0, seed=0, logprobs=0)
    assert plan.sampling.greedy
    assert plan.sampling.seed == 0
    assert plan.logprobs == 0


def test_max_tokens_never_leaves_the_context() -> None:
    assert convert(max_tokens=4).max_tokens == 4
    assert convert(max_tokens=2**32 - 1).max_tokens == CONTEXT - 3


def test_top_k_that_covers_the_vocabulary_is_off() -> None:
    assert convert(top_k=VOCABULARY - 1).sampling.top_k == VOCABULARY - 1
    assert convert(top_k=VOCABULARY).sampling.top_k == 0
    assert convert(top_k=2**32 - 1).sampling.top_k == 0


def test_stop_tokens_join_the_ends_of_sequence_unless_those_are_ignored() -> None:
    assert convert(stop_token_ids=[9]).stop_token_ids == {2, 3, 9}
    assert convert(stop_token_ids=[9], ignore_eos=True).stop_token_ids == {9}


@pytest.mark.parametrize(
    ("field", "params"),
    [
        ("temperature", {"temperature": -1.0}),
        ("temperature", {"temperature": math.nan}),
        ("temperature", {"temperature": math.inf}),
        ("top_p", {"top_p": 1.5}),
        ("top_p", {"top_p": -1.0}),
        ("top_p", {"top_p": math.nan}),
        ("min_p", {"min_p": 2.0}),
        ("min_p", {"min_p": -1.0}),
        ("repetition_penalty", {"repetition_penalty": -0.5}),
        ("repetition_penalty", {"repetition_penalty": math.inf}),
        ("frequency_penalty", {"frequency_penalty": 2.5}),
        ("presence_penalty", {"presence_penalty": -2.5}),
        ("logit_bias", {"logit_bias": {VOCABULARY: 1.0}}),
        ("logit_bias", {"logit_bias": {-1: 1.0}}),
        ("logit_bias", {"logit_bias": {5: math.nan}}),
        ("logit_bias", {"logit_bias": {5: 101.0}}),
        ("max_tokens", {"max_tokens": 0}),
        ("stop_token_ids", {"stop_token_ids": [VOCABULARY]}),
        ("logprobs", {"logprobs": -1}),
        ("logprobs", {"logprobs": 21}),
        ("seed", {"seed": -1}),
    ],
)
def test_a_refusal_names_the_field_the_value_and_the_limit(
    field: str, params: dict[str, Any]
) -> None:
    with pytest.raises(InvalidRequest, match=rf"^sampling_params\.{field}\S* .*is .*: must be"):
        convert(**params)


@pytest.mark.parametrize(
    ("ids", "text"),
    [
        ([], "tokenized.input_ids is []"),
        ([5, VOCABULARY], "tokenized.input_ids[1] is 100"),
        ([4_000_000], "tokenized.input_ids[0] is 4000000"),
        ([5] * CONTEXT, "32 tokens"),
    ],
)
def test_a_prompt_that_the_model_cannot_take_is_refused(ids: list[int], text: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        convert(ids)
    assert text in caught.value.message


def test_the_longest_prompt_leaves_room_for_one_token() -> None:
    assert convert([5] * (CONTEXT - 1)).max_tokens == 1


def test_a_prompt_of_any_length_is_refused_without_a_copy_of_it() -> None:
    with pytest.raises(InvalidRequest, match="1000000000000 tokens"):
        requests.convert(pb.GenerateRequest(), range(10**12), FACTS, max_logprobs=20)


def test_a_request_without_input_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="tokenized or text"):
        requests.check_has_input(pb.GenerateRequest())


def test_an_empty_text_is_no_prompt_even_where_a_tokenizer_would_begin_it() -> None:
    with pytest.raises(InvalidRequest, match="text"):
        requests.check_has_input(pb.GenerateRequest(text=""))
    requests.check_has_input(pb.GenerateRequest(text=" "))

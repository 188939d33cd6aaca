from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from smg_grpc_proto.generated import vllm_engine_pb2 as pb
from tests.lanes.vllm.refused import refusals
from tests.support.fake_vllm import RequestOutputKind

from smg_grpc_servicer.serving.text import TextInput
from smg_grpc_servicer.vllm import requests
from smg_grpc_servicer.vllm.limits import Limits
from smg_wire.errors import (
    EngineRefusal,
    FailedPrecondition,
    InvalidRequest,
    SmgError,
    UnsupportedField,
)

pytestmark = pytest.mark.usefixtures("vllm")

LIMITS = Limits(
    vocab_size=1000,
    context=2048,
    generates=True,
    most_logprobs=20,
    all_logprobs=False,
    most_choices=16384,
    most_temperature=2.0,
    data_parallel_ranks=1,
)


def text() -> TextInput:
    return TextInput(lambda prompt: [ord(c) for c in prompt], context=2048, longest_token=16)


async def plan(limits: Limits = LIMITS, **fields: Any) -> requests.Plan:
    if not {"tokenized", "text"} & set(fields):
        fields["tokenized"] = pb.TokenizedInput(input_ids=[10, 11, 12])
    request = pb.GenerateRequest(**fields)
    ids = await requests.prompt_ids(request, limits, text())
    return requests.generation(request, ids, limits)


async def sampled(limits: Limits = LIMITS, **params: Any) -> Any:
    return (await plan(limits, sampling_params=pb.SamplingParams(**params))).params


async def test_an_absent_sampling_params_is_all_of_them_absent() -> None:
    absent, empty = await plan(), await sampled()
    assert absent.params == empty
    assert (empty.temperature, empty.top_p, empty.top_k, empty.min_p) == (1.0, 1.0, 0, 0.0)
    assert (empty.repetition_penalty, empty.n, empty.seed) == (1.0, 1, None)
    assert (empty.max_tokens, empty.min_tokens) == (2045, 0)
    assert (empty.logprobs, empty.prompt_logprobs, empty.flat_logprobs) == (None, None, False)
    assert (empty.stop, empty.stop_token_ids, empty.detokenize) == ([], [], False)


async def test_what_is_left_unset_is_the_models_own_default() -> None:
    own = {"temperature": 0.6, "top_p": 0.9, "repetition_penalty": 1.1, "max_tokens": 7}
    limits = replace(LIMITS, default_sampling=own)
    unset = await sampled(limits)
    assert (unset.temperature, unset.top_p) == (0.6, 0.9)
    assert (unset.repetition_penalty, unset.max_tokens) == (1.1, 7)
    given = await sampled(limits, temperature=0.0, top_p=1.0, repetition_penalty=1.0, max_tokens=9)
    assert (given.temperature, given.top_p) == (0.0, 1.0)
    assert (given.repetition_penalty, given.max_tokens) == (1.0, 9)


async def test_every_field_reaches_vllm() -> None:
    params = await sampled(
        temperature=0.5,
        top_p=0.25,
        top_k=7,
        min_p=0.125,
        frequency_penalty=-1.5,
        presence_penalty=1.5,
        repetition_penalty=1.25,
        max_tokens=20,
        min_tokens=3,
        stop=["end"],
        stop_token_ids=[5],
        skip_special_tokens=True,
        spaces_between_special_tokens=True,
        ignore_eos=True,
        n=3,
        logprobs=2,
        prompt_logprobs=0,
        seed=0,
        include_stop_str_in_output=True,
        logit_bias={4: -100.0},
    )
    assert vars(params) == {
        "temperature": 0.5,
        "top_p": 0.25,
        "top_k": 7,
        "min_p": 0.125,
        "frequency_penalty": -1.5,
        "presence_penalty": 1.5,
        "repetition_penalty": 1.25,
        "max_tokens": 20,
        "min_tokens": 3,
        "stop": ["end"],
        "stop_token_ids": [5],
        "skip_special_tokens": True,
        "spaces_between_special_tokens": True,
        "ignore_eos": True,
        "n": 3,
        "logprobs": 2,
        "prompt_logprobs": 0,
        "seed": 0,
        "include_stop_str_in_output": True,
        "logit_bias": {4: -100.0},
        "detokenize": True,
        "flat_logprobs": True,
        "output_kind": RequestOutputKind.FINAL_ONLY,
        "skip_clone": True,
    }


async def test_a_stream_gets_what_is_new_and_a_unary_call_one_output() -> None:
    assert (await plan(stream=True)).params.output_kind is RequestOutputKind.DELTA
    assert (await plan()).params.output_kind is RequestOutputKind.FINAL_ONLY


async def test_a_tiny_temperature_is_what_vllm_would_make_of_it() -> None:
    assert (await sampled(temperature=1e-9)).temperature == 0.01
    assert (await sampled(temperature=0.0)).temperature == 0.0


async def test_a_top_k_of_the_whole_vocabulary_is_off() -> None:
    assert (await sampled(top_k=999)).top_k == 999
    assert (await sampled(top_k=1000)).top_k == 0
    assert (await sampled(top_k=2**32 - 1)).top_k == 0


async def test_all_logprobs_need_a_configuration_that_allows_them() -> None:
    every = replace(LIMITS, most_logprobs=1000, all_logprobs=True)
    assert (await sampled(every, logprobs=-1, prompt_logprobs=-1)).logprobs == -1
    with pytest.raises(InvalidRequest, match=r"logprobs is -1: must be in \[0, 20\]"):
        await sampled(logprobs=-1)


class Facts:
    """The table's facts, on these limits."""

    vocabulary = LIMITS.vocab_size
    context = LIMITS.context
    prompts = ([10, 11, 12],)


# Whether a constraint is well formed is for vLLM's own compiler to say; it is asked in the lane.
_COMPILED = ("regex", "grammar", "json_schema", "structural_tag")
_CASES = [
    case
    for case in refusals(Facts, most_logprobs=20)  # type: ignore[arg-type]
    if not case.name.startswith(_COMPILED) or "characters" in str(case.words)
]


@pytest.mark.parametrize("case", _CASES, ids=lambda case: case.name)
async def test_each_bad_value_is_refused_by_name(case: Any) -> None:
    async def converted() -> None:
        ids = await requests.prompt_ids(case.request, LIMITS, text())
        requests.generation(case.request, ids, LIMITS)

    with pytest.raises(SmgError) as caught:
        await converted()
    assert caught.value.status.name == "INVALID_ARGUMENT"
    for word in case.words:
        assert word in caught.value.message


@pytest.mark.parametrize(
    ("left", "asked", "kept"),
    [
        (False, 2, [11, 12]),
        (True, 2, [10, 11]),
        (False, -1, [10, 11, 12]),
        (False, 9, [10, 11, 12]),
    ],
)
async def test_a_prompt_is_truncated_on_the_tokenizers_side(
    left: bool, asked: int, kept: list[int]
) -> None:
    limits = replace(LIMITS, keeps_left=left)
    params = pb.SamplingParams(truncate_prompt_tokens=asked)
    assert (await plan(limits, sampling_params=params)).prompt_ids == kept


async def test_a_prompt_is_truncated_before_its_length_and_its_ids_are_judged() -> None:
    long = pb.TokenizedInput(input_ids=[5000] * 3000 + [7] * 2047)
    for asked, length in ((-1, 2047), (100, 100)):
        params = pb.SamplingParams(truncate_prompt_tokens=asked)
        found = await plan(tokenized=long, sampling_params=params)
        assert found.prompt_ids == [7] * length
    params = pb.SamplingParams(truncate_prompt_tokens=2048)
    with pytest.raises(InvalidRequest, match="2048 tokens"):
        await plan(tokenized=long, sampling_params=params)


async def test_text_longer_than_any_context_is_truncated_as_well() -> None:
    params = pb.SamplingParams(truncate_prompt_tokens=3)
    found = await plan(text="a" * 100_000 + "bcd", sampling_params=params)
    assert found.prompt_ids == [98, 99, 100]


async def test_a_constraint_reaches_vllm_under_its_own_name() -> None:
    kinds: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"json_schema": "{}"}, {"json": "{}"}),
        ({"regex": "a"}, {"regex": "a"}),
        ({"grammar": "g"}, {"grammar": "g"}),
        ({"structural_tag": "{}"}, {"structural_tag": "{}"}),
        ({"json_object": True}, {"json_object": True}),
        ({"choice": pb.ChoiceConstraint(choices=["a", "b"])}, {"choice": ["a", "b"]}),
    ]
    for fields, expected in kinds:
        found = await plan(sampling_params=pb.SamplingParams(**fields))
        assert vars(found.params.structured_outputs) == expected
        assert found.constraint is not None
        assert not found.constraint.from_first_token


async def test_a_grammar_from_the_first_token_needs_a_release_that_has_it() -> None:
    params = pb.SamplingParams(regex="a", grammar_from_first_token=True)
    found = await plan(sampling_params=params)
    assert found.constraint is not None
    assert found.constraint.from_first_token
    with pytest.raises(UnsupportedField, match="grammar_from_first_token"):
        await plan(replace(LIMITS, first_token_grammar=False), sampling_params=params)


async def test_connector_parameters_go_in_as_they_are() -> None:
    limits = replace(LIMITS, kv_connector=True)
    typed = pb.KvTransferParams(remote_host="h", remote_port=7)
    text = '{"do_remote_prefill": true, "blocks": [1, 2]}'
    found = await plan(limits, kv_transfer_params_json=text, kv_transfer_params=typed)
    assert found.params.extra_args == {
        "kv_transfer_params": {"do_remote_prefill": True, "blocks": [1, 2]}
    }
    found = await plan(limits, kv_transfer_params=typed)
    assert found.params.extra_args == {"kv_transfer_params": {"remote_host": "h", "remote_port": 7}}
    assert found.moves_kv


async def test_connector_parameters_without_a_connector_are_refused() -> None:
    for fields in (
        {"kv_transfer_params_json": '{"a": 1}'},
        {"kv_transfer_params": pb.KvTransferParams(remote_host="h")},
    ):
        with pytest.raises(FailedPrecondition, match="kv_transfer_params"):
            await plan(**fields)
    # Nothing is what a worker without a connector can do.
    assert not hasattr((await plan(kv_transfer_params_json="{}")).params, "extra_args")


async def test_what_this_engine_cannot_do_is_refused_by_name() -> None:
    cases: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        ({"speculative": True}, {"min_p": 0.5}, "min_p"),
        ({"speculative": True}, {"logit_bias": {1: 1.0}}, "logit_bias"),
        ({"prompt_logprobs": False}, {"prompt_logprobs": 0}, "prompt_logprobs"),
        ({"has_tokenizer": False}, {"stop": ["x"]}, "stop"),
        ({"has_tokenizer": False}, {"regex": "x"}, "regex"),
    ]
    for changed, params, name in cases:
        with pytest.raises(UnsupportedField, match=name):
            await sampled(replace(LIMITS, **changed), **params)
    with pytest.raises(UnsupportedField, match="text"):
        await plan(replace(LIMITS, has_tokenizer=False), text="hello")


async def test_a_rank_is_one_of_the_engines() -> None:
    found = await plan(replace(LIMITS, data_parallel_ranks=4), data_parallel_rank=3)
    assert found.data_parallel_rank == 3
    assert (await plan()).data_parallel_rank is None


async def test_an_embedding_may_fill_the_context() -> None:
    limits = replace(LIMITS, generates=False)

    def embedded(count: int) -> requests.Plan:
        tokenized = pb.TokenizedInput(input_ids=[5] * count)
        return requests.embedding(pb.EmbedRequest(tokenized=tokenized), limits)

    found = embedded(2048)
    assert len(found.prompt_ids) == 2048
    assert found.params.task == "embed"
    for count, words in ((0, "at least one"), (2049, "no longer than the context of 2048")):
        with pytest.raises(InvalidRequest, match=words):
            embedded(count)
    with pytest.raises(InvalidRequest, match="tokenized"):
        requests.embedding(pb.EmbedRequest(), limits)


async def test_a_model_does_what_it_is_served_for() -> None:
    with pytest.raises(EngineRefusal, match="does not support generation"):
        await plan(replace(LIMITS, generates=False))
    tokenized = pb.TokenizedInput(input_ids=[5])
    with pytest.raises(EngineRefusal, match="does not support pooling"):
        requests.embedding(pb.EmbedRequest(tokenized=tokenized), LIMITS)

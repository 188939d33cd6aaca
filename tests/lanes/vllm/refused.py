"""The bad-input table of vLLM's wire."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from smg_grpc_proto.generated import vllm_engine_pb2 as pb
from tests.conformance.driver import Refusal

if TYPE_CHECKING:
    from tests.conformance.driver import Facts

MEDIA = pb.MediaRefs(items=[pb.MediaRef(url="data:,x")])


def refusals(facts: Facts, *, most_logprobs: int) -> list[Refusal]:
    """Every field of the wire beyond each of its bounds."""
    table = [
        _sampling(facts, field, value, words)
        for field, value, words in [
            *_numbers(most_logprobs),
            *_ids(facts),
            *_stops(),
            *_constraints(),
        ]
    ]
    return [*table, *_prompts(facts), *_requests(facts)]


def _sampling(facts: Facts, field: str, value: Any, words: tuple[str, ...]) -> Refusal:
    params = {"temperature": 1.0, "max_tokens": 4, field: value}
    request = pb.GenerateRequest(
        tokenized=pb.TokenizedInput(input_ids=facts.prompts[0]),
        sampling_params=pb.SamplingParams(**params),
        stream=True,
    )
    return Refusal(f"{field}={value!r:.60}", request, (f"sampling_params.{field}", *words))


def _numbers(most_logprobs: int) -> list[tuple[str, Any, tuple[str, ...]]]:
    bad: list[tuple[str, Any, tuple[str, ...]]] = [
        ("temperature", -0.1, ("-0.1", "[0, 2]")),
        ("temperature", 2.1, ("2.1", "[0, 2]")),
        ("top_p", 1.01, ("1.01", "[0, 1]")),
        ("top_p", -0.01, ("-0.01", "[0, 1]")),
        ("min_p", 1.01, ("1.01", "[0, 1]")),
        ("min_p", -0.01, ("-0.01", "[0, 1]")),
        ("repetition_penalty", -0.1, ("-0.1", "at least 0")),
        ("frequency_penalty", 2.01, ("2.01", "[-2, 2]")),
        ("frequency_penalty", -2.01, ("-2.01", "[-2, 2]")),
        ("presence_penalty", 2.01, ("2.01", "[-2, 2]")),
        ("presence_penalty", -2.01, ("-2.01", "[-2, 2]")),
        ("max_tokens", 0, ("0", "at least 1")),
        ("min_tokens", 5, ("5", "at most 4")),
        ("n", 100_000, ("100000", "16384")),
        ("truncate_prompt_tokens", 0, ("0", "[1, 2048]")),
        ("truncate_prompt_tokens", -7, ("-7", "-1", "[1, 2048]")),
        ("truncate_prompt_tokens", 2049, ("2049", "[1, 2048]")),
    ]
    for name in ("logprobs", "prompt_logprobs"):
        limit = f"[0, {most_logprobs}]"
        bad += [(name, value, (str(value), limit)) for value in (-1, -2, most_logprobs + 1)]
    floats = ["temperature", "top_p", "min_p", "repetition_penalty"]
    floats += ["frequency_penalty", "presence_penalty"]
    for value in (math.nan, math.inf, -math.inf):
        bad += [(name, value, (repr(value), "must be")) for name in floats]
        bad.append(("logit_bias", {5: value}, (repr(value), "[-100, 100]")))
    return bad


def _ids(facts: Facts) -> list[tuple[str, Any, tuple[str, ...]]]:
    last, beyond, top = str(facts.vocabulary - 1), facts.vocabulary, 2**32 - 1
    return [
        ("stop_token_ids", [beyond], (str(beyond), last)),
        ("stop_token_ids", [1, top], (str(top), last)),
        ("logit_bias", {beyond: 1.0}, (str(beyond), last)),
        ("logit_bias", {-1: 1.0}, ("-1", last)),
        ("logit_bias", {5: 100.5}, ("100.5", "[-100, 100]")),
        ("logit_bias", {5: -100.5}, ("-100.5", "[-100, 100]")),
    ]


def _stops() -> list[tuple[str, Any, tuple[str, ...]]]:
    return [
        ("stop", [""], ("[0]", "empty")),
        ("stop", ["end", ""], ("[1]", "empty")),
        ("stop", ["x"] * 65, ("65", "64")),
        ("stop", ["x" * 1025], ("1025", "1024")),
    ]


def _constraints() -> list[tuple[str, Any, tuple[str, ...]]]:
    return [
        ("regex", "(((", ("(((", "unclosed")),
        ("regex", "(a|b){2,1}", ("repetition",)),
        ("regex", "a\0b", ("NUL",)),
        ("regex", "a" * 300_000, ("300000", "262144")),
        ("grammar", "root ::= (", ("root ::= (",)),
        ("grammar", " ", ("empty",)),
        ("json_schema", "", ("empty",)),
        ("json_schema", "{", ("JSON",)),
        ("json_schema", "[1]", ("[1]",)),
        ("json_schema", '{"type": "nonsense"}', ("nonsense",)),
        ("json_schema", '{"$ref": "#/nowhere"}', ("nowhere",)),
        ("json_schema", "[" * 5000 + "]" * 5000, ("nested",)),
        ("structural_tag", "no tag", ("no tag",)),
        ("structural_tag", "{}", ("{}",)),
        ("json_object", False, ("False", "true")),
        ("choice", pb.ChoiceConstraint(), ("choices", "at least one")),
    ]


def _prompts(facts: Facts) -> list[Refusal]:
    ids, context = list(facts.prompts[0]), facts.context
    beyond, top, last = facts.vocabulary, 2**32 - 1, str(facts.vocabulary - 1)
    prompts: list[tuple[str, list[int], tuple[str, ...]]] = [
        ("empty", [], ("at least one",)),
        ("full", [ids[0]] * context, (str(context), "context")),
        ("longer", [ids[0]] * (context + 1), (str(context + 1), str(context))),
        ("beyond", [*ids, beyond], (f"[{len(ids)}]", str(beyond), last)),
        ("far beyond", [top], ("[0]", str(top), last)),
    ]
    return [
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


def _requests(facts: Facts) -> list[Refusal]:
    tokenized = pb.TokenizedInput(input_ids=facts.prompts[0])
    few = pb.SamplingParams(max_tokens=4)
    bad: list[tuple[str, dict[str, Any], tuple[str, ...]]] = [
        ("no input", {"tokenized": None}, ("input", "tokenized", "text")),
        ("empty text", {"tokenized": None, "text": ""}, ("text", "at least one")),
        ("long text", {"tokenized": None, "text": "sea " * 5000}, ("text", "context of 2048")),
        ("rank 1", {"data_parallel_rank": 1}, ("data_parallel_rank", "1", "[0, 0]")),
        ("rank -1", {"data_parallel_rank": -1}, ("data_parallel_rank", "-1", "[0, 0]")),
        ("kv no json", {"kv_transfer_params_json": "[1"}, ("kv_transfer_params_json", "JSON")),
        ("kv no object", {"kv_transfer_params_json": "[1]"}, ("kv_transfer_params_json", "object")),
        ("kv nan", {"kv_transfer_params_json": '{"a": NaN}'}, ("kv_transfer_params_json", "NaN")),
        ("pixels", {"mm_inputs": pb.MultimodalInputs()}, ("mm_inputs",)),
        ("media", {"media_refs": MEDIA}, ("media_refs",)),
        ("more pixels", {"extra_mm_inputs": [pb.MultimodalInputs()]}, ("extra_mm_inputs",)),
    ]
    table = [
        Refusal(
            name,
            pb.GenerateRequest(**{"tokenized": tokenized, "sampling_params": few, **fields}),
            words,
        )
        for name, fields, words in bad
    ]
    greedy = pb.SamplingParams(temperature=0.0, n=2, max_tokens=4)
    several = pb.GenerateRequest(tokenized=tokenized, sampling_params=greedy)
    return [*table, Refusal("greedy n", several, ("n must be 1", "2"))]

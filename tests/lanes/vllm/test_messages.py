"""Messages with any field set to any value, amid streams whose answers are known.

The suite's own storm keeps to what every engine's wire has; this one sets what is vLLM's alone.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from smg_grpc_proto.generated import vllm_engine_pb2 as pb
from tests.conformance.driver import Params
from tests.conformance.reading import answer, answers, idle

if TYPE_CHECKING:
    from tests.conformance.driver import Driver, Facts
    from tests.lanes.vllm.wire import VllmClient

pytestmark = pytest.mark.engine

BATCH = 8
ALLOWED = {
    grpc.StatusCode.INVALID_ARGUMENT,
    # Connector parameters without a connector; a grammar that only the engine finds wrong.
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
}
WORDS = st.text(st.characters(exclude_categories=("Cs",)), max_size=12)
JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.text("abc", max_size=3)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text("abc", max_size=3), inner, max_size=3)
    ),
    max_leaves=6,
).map(json.dumps)
SCHEMAS = st.sampled_from(
    [
        '{"type": "integer"}',
        '{"type": "object", "properties": {"a": {"type": "string"}}}',
        '{"type": "array", "items": {"type": "number"}, "maxItems": 3}',
        '{"enum": ["a", 1, null]}',
        '{"anyOf": [{"type": "boolean"}, {"const": 5}]}',
    ]
)
REGEXES = st.sampled_from(["[a-z]+", "(yes|no)", "[0-9]{2,4}", ".*", "a{0,3}b?"])
GRAMMARS = st.sampled_from(['root ::= "a" | "b"', 'root ::= [0-9]+ "."', "start: /[a-z]+/"])
TAG = '{"type": "structural_tag", "format": {"type": "const_string", "value": "hello"}}'


def constraints(*, wild: bool) -> st.SearchStrategy[dict[str, Any]]:
    """One constraint, well formed or whatever."""
    choices = st.lists(WORDS, min_size=0 if wild else 1, max_size=4)
    kinds: dict[str, st.SearchStrategy[Any]] = {
        "json_schema": st.one_of(JSON, WORDS) if wild else SCHEMAS,
        "regex": WORDS if wild else REGEXES,
        "grammar": WORDS if wild else GRAMMARS,
        "structural_tag": st.one_of(JSON, WORDS) if wild else st.just(TAG),
        "json_object": st.booleans() if wild else st.just(True),
        "choice": choices.map(lambda words: pb.ChoiceConstraint(choices=words)),
    }
    return st.sampled_from(sorted(kinds)).flatmap(
        lambda kind: kinds[kind].map(lambda value: {kind: value})
    )


def ordinary(facts: Facts) -> dict[str, st.SearchStrategy[Any]]:
    token = st.integers(0, facts.vocabulary - 1)
    return {
        "temperature": st.floats(0.125, 2, width=32),
        "top_p": st.floats(0, 1, width=32),
        "top_k": st.integers(0, 100),
        "min_p": st.floats(0, 1, width=32),
        "frequency_penalty": st.floats(-2, 2, width=32),
        "presence_penalty": st.floats(-2, 2, width=32),
        "repetition_penalty": st.floats(0, 2, width=32),
        "min_tokens": st.integers(0, 2),
        "stop": st.lists(st.text("aeiou ", min_size=1, max_size=3), max_size=3),
        "stop_token_ids": st.lists(token, max_size=3),
        "skip_special_tokens": st.booleans(),
        "spaces_between_special_tokens": st.booleans(),
        "ignore_eos": st.booleans(),
        "n": st.integers(0, 3),
        "logprobs": st.integers(0, 5),
        "prompt_logprobs": st.integers(0, 5),
        "seed": st.integers(-(2**31), 2**31 - 1),
        "include_stop_str_in_output": st.booleans(),
        "logit_bias": st.dictionaries(token, st.floats(-100, 100, width=32), max_size=4),
        "truncate_prompt_tokens": st.one_of(st.just(-1), st.integers(1, 30)),
        "grammar_from_first_token": st.booleans(),
    }


def wild() -> dict[str, st.SearchStrategy[Any]]:
    number, small = st.floats(width=32), st.integers(0, 2**32 - 1)
    signed = st.integers(-(2**31), 2**31 - 1)
    return {
        **dict.fromkeys(("temperature", "top_p", "min_p", "repetition_penalty"), number),
        **dict.fromkeys(("frequency_penalty", "presence_penalty"), number),
        # Not all of a request's limits: one that takes a million choices or tokens is valid.
        **dict.fromkeys(("top_k", "min_tokens"), small),
        "n": st.integers(20_000, 2**32 - 1),
        "stop": st.lists(WORDS, max_size=3),
        "stop_token_ids": st.lists(small, max_size=3),
        **dict.fromkeys(("logprobs", "prompt_logprobs", "truncate_prompt_tokens"), signed),
        "logit_bias": st.dictionaries(signed, number, max_size=3),
    }


@st.composite
def requests(draw: st.DrawFn, facts: Facts) -> pb.GenerateRequest:
    """Most are valid; a few have one field that need not be."""
    usual, unusual = ordinary(facts), wild()
    names = draw(st.lists(st.sampled_from(sorted(usual)), max_size=6, unique=True))
    params = {name: draw(usual[name]) for name in names}
    extra: dict[str, Any] = {}
    what = draw(st.sampled_from(["usual"] * 6 + ["constraint"] * 2 + ["wild", "form", "request"]))
    if what == "wild":
        name = draw(st.sampled_from(sorted(unusual)))
        params[name] = draw(unusual[name])
    elif what in ("constraint", "form"):
        params |= draw(constraints(wild=what == "form"))
    elif what == "request":
        extra = draw(
            st.sampled_from(
                [
                    {"data_parallel_rank": -1},
                    {"kv_transfer_params_json": '{"do_remote_prefill": true}'},
                    {"kv_transfer_params_json": "{"},
                    {"mm_inputs": pb.MultimodalInputs()},
                ]
            )
        )
    params.setdefault("temperature", 1.0)
    prompt = list(draw(st.sampled_from(list(facts.prompts))))
    return pb.GenerateRequest(
        tokenized=pb.TokenizedInput(input_ids=prompt),
        sampling_params=pb.SamplingParams(max_tokens=draw(st.integers(2, 6)), **params),
        stream=draw(st.booleans()),
        **extra,
    )


def generated(facts: Facts, count: int) -> list[list[pb.GenerateRequest]]:
    batches: list[list[pb.GenerateRequest]] = []

    @settings(
        max_examples=-(-count // BATCH),
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.lists(requests(facts), min_size=BATCH, max_size=BATCH))
    def collect(batch: list[pb.GenerateRequest]) -> None:
        batches.append(batch)

    collect()
    return batches


class TestMessages:
    async def test_any_fields_in_the_quick_lane(
        self, client: VllmClient, facts: Facts, driver: Driver
    ) -> None:
        await storm(client, facts, driver, 120)

    @pytest.mark.slow
    @pytest.mark.timeout(3600)
    async def test_any_fields_of_thousands(
        self, client: VllmClient, facts: Facts, driver: Driver
    ) -> None:
        await storm(client, facts, driver, 2000)


async def storm(client: VllmClient, facts: Facts, driver: Driver, count: int) -> None:
    right = [(await answer(client.generate(p, Params()))).token_ids for p in facts.prompts]
    tally: Counter[str] = Counter()
    wrong: list[str] = []
    for number, batch in enumerate(await asyncio.to_thread(generated, facts, count)):
        place = number % len(facts.prompts)
        known = asyncio.ensure_future(answer(client.generate(facts.prompts[place], Params())))
        await asyncio.gather(*(one(client, request, tally, wrong) for request in batch))
        if (await known).token_ids != right[place]:
            wrong.append(f"a greedy stream was wrong amid {batch}")
    assert not wrong, f"{len(wrong)} of {count}: " + "\n".join(wrong[:3])
    assert tally["ran"] >= 0.4 * count, tally
    assert tally["refused"] > 0, tally
    await idle(client, driver.settle_seconds)
    assert [(await answer(client.generate(p, Params()))).token_ids for p in facts.prompts] == right


async def one(
    client: VllmClient, request: pb.GenerateRequest, tally: Counter[str], wrong: list[str]
) -> None:
    try:
        choices = max(1, request.sampling_params.n) if request.sampling_params.n < 99 else 1
        found = await answers(client.send(request), choices=choices)
    except grpc.aio.AioRpcError as error:
        tally["refused"] += 1
        if error.code() not in ALLOWED:
            wrong.append(f"{error.code().name} {error.details()!r} for {request}")
    except Exception as error:  # every request is judged; the first must not hide the others
        wrong.append(f"{error!r} for {request}")
    else:
        tally["ran"] += 1
        most = request.sampling_params.max_tokens
        if any(len(choice.token_ids) > most for choice in found):
            wrong.append(f"more than {most} tokens for {request}")

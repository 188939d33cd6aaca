"""What goes through our worker is what vLLM itself would have said."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from smg_grpc_proto.generated import vllm_engine_pb2 as pb
from tests.conformance.driver import Params
from tests.conformance.fixtures import start
from tests.conformance.reading import answer, answers, eventually, failure
from tests.lanes.vllm.driver import VllmDriver
from tests.lanes.vllm.reference import TOKENS, reference
from tests.lanes.vllm.wire import VllmClient
from tests.support.processes import scrape

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tests.conformance.driver import Facts
    from tests.conformance.fixtures import Connect, Lane
    from tests.conformance.reading import Answer

pytestmark = pytest.mark.engine

TOLERANCE = 1e-3
GREEDY = Params(max_tokens=TOKENS, logprobs=1)


@pytest.fixture(scope="session")
def prompts(driver: VllmDriver) -> list[list[int]]:
    """Thirty-two prompts of lengths from three tokens to a hundred."""
    whole = [list(prompt) for prompt in driver.facts.prompts]
    long = [token for prompt in whole for token in prompt]
    return [(long[n:] + long)[: 3 + 3 * n] for n in range(28)] + whole


@pytest.fixture(scope="session")
def expected(
    demo_model: str, prompts: list[list[int]], tmp_path_factory: pytest.TempPathFactory
) -> Any:
    file = tmp_path_factory.mktemp("reference") / "generate.json"
    return reference(demo_model, "generate", prompts, file)


def check(found: Answer, wanted: dict[str, Any]) -> None:
    """The same tokens and logprobs, up to where vLLM itself was undecided."""
    assert found.logprobs is not None
    for place, token in enumerate(wanted["token_ids"]):
        if found.token_ids[place] != token:
            assert wanted["margins"][place] < TOLERANCE
            return
        assert found.logprobs.values[place] == pytest.approx(
            wanted["logprobs"][place], abs=TOLERANCE
        )
    assert len(found.token_ids) == TOKENS


class TestEquality:
    async def test_a_lone_answer_is_vllms_own(
        self, client: VllmClient, prompts: list[list[int]], expected: Any
    ) -> None:
        for place in (0, 9, 29):
            for stream in (True, False):
                found = await answer(client.generate(prompts[place], GREEDY, stream=stream))
                check(found, expected[place])

    async def test_answers_among_thirty_two_are_vllms_own(
        self, client: VllmClient, prompts: list[list[int]], expected: Any
    ) -> None:
        calls = [
            answer(client.generate(prompt, GREEDY, stream=place % 4 > 0))
            for place, prompt in enumerate(prompts)
        ]
        for found, wanted in zip(await asyncio.gather(*calls), expected, strict=True):
            check(found, wanted)

    async def test_the_prompts_logprobs_are_vllms_own(
        self, client: VllmClient, prompts: list[list[int]], expected: Any
    ) -> None:
        prompt = prompts[9]
        for stream in (True, False):
            messages = await raw(client, prompt, stream=stream, prompt_logprobs=2, max_tokens=3)
            given = [m for m in messages if m.HasField("input_logprobs")]
            assert given == messages[:1], "in the first message alone"
            logprobs = given[0].input_logprobs
            assert list(logprobs.token_ids) == prompt
            assert [e.HasField("value") for e in logprobs.token_logprobs] == [
                False,
                *[True] * (len(prompt) - 1),
            ]
            values = [entry.value for entry in logprobs.token_logprobs[1:]]
            assert values == pytest.approx(expected[9]["prompt_logprobs"], abs=TOLERANCE)
            assert [len(top.values) for top in logprobs.top_logprobs] == [
                0,
                *[2] * (len(prompt) - 1),
            ]
            for top in logprobs.top_logprobs:
                assert list(top.values) == sorted(top.values, reverse=True)

    async def test_text_is_what_its_tokens_are(self, client: VllmClient, facts: Facts) -> None:
        assert facts.decode is not None
        prompt = facts.prompts[1]
        text = pb.GenerateRequest(
            text=facts.decode(prompt), sampling_params=greedy(max_tokens=8), stream=True
        )
        by_ids = await answer(client.generate(prompt, Params()))
        assert (await answer(client.send(text))).token_ids == by_ids.token_ids


def greedy(**more: Any) -> pb.SamplingParams:
    return pb.SamplingParams(**{"temperature": 0.0, "ignore_eos": True, **more})


async def raw(
    client: VllmClient, prompt: Sequence[int], *, stream: bool = False, **params: Any
) -> list[Any]:
    """The messages of an answer as they are."""
    request = pb.GenerateRequest(
        tokenized=pb.TokenizedInput(input_ids=prompt),
        sampling_params=greedy(**params),
        stream=stream,
    )
    return [
        getattr(response, response.WhichOneof("response"))
        async for response in client.stub.Generate(request)
    ]


SCHEMA = {
    "type": "object",
    "properties": {"age": {"type": "integer", "minimum": 10, "maximum": 99}},
    "required": ["age"],
    "additionalProperties": False,
}
TAG = {"type": "structural_tag", "format": {"type": "const_string", "value": "hello"}}


def says_age(text: str) -> bool:
    value = json.loads(text)
    return set(value) == {"age"} and 10 <= value["age"] <= 99


CONSTRAINTS: dict[str, tuple[Any, Any]] = {
    "json_schema": (json.dumps(SCHEMA), says_age),
    "regex": ("[0-9]{3}-[a-f]{2}", re.compile(r"\d{3}-[a-f]{2}").fullmatch),
    "grammar": ('root ::= "up" | "down" "!"', re.compile(r"up|down!").fullmatch),
    "structural_tag": (json.dumps(TAG), re.compile("hello").fullmatch),
    "choice": (
        pb.ChoiceConstraint(choices=["yes", "no", 'a "b"']),
        re.compile("yes|no|a .b.").fullmatch,
    ),
}


class TestConstraints:
    @pytest.mark.parametrize("kind", CONSTRAINTS)
    async def test_the_answer_matches_its_constraint(
        self, client: VllmClient, facts: Facts, kind: str
    ) -> None:
        value, matches = CONSTRAINTS[kind]
        assert facts.decode is not None
        # JSON may have any white space, and a small model would write nothing else.
        blank = [t for t in range(facts.vocabulary) if not facts.decode([t]).strip()]
        for stream in (True, False):
            (*_, end) = messages = await raw(
                client,
                facts.prompts[0],
                stream=stream,
                max_tokens=64,
                grammar_from_first_token=stream,
                ignore_eos=False,
                logit_bias=dict.fromkeys(blank, -100.0),
                **{kind: value},
            )
            assert end.finish_reason == "stop"
            ids = [t for m in messages[:-1] for t in m.token_ids] if stream else end.output_ids
            text = facts.decode(ids).removesuffix(facts.decode([facts.end_of_sequence]))
            assert matches(text), text

    async def test_a_json_object_is_one(self, client: VllmClient, facts: Facts) -> None:
        # A small model would fill it with anything for ever: it is made to close it at once.
        assert facts.decode is not None
        close = next(t for t in range(facts.vocabulary) if facts.decode([t]) == "}")
        (end,) = await raw(
            client,
            facts.prompts[0],
            max_tokens=16,
            json_object=True,
            logit_bias={close: 100.0},
            ignore_eos=False,
        )
        text = facts.decode(end.output_ids).removesuffix(facts.decode([facts.end_of_sequence]))
        assert json.loads(text) == {}

    async def test_a_grammar_that_only_the_engine_finds_wrong_ends_by_its_status(
        self, client: VllmClient, facts: Facts
    ) -> None:
        # It parses, and never ends: the compiler in the engine is the first to see it.
        call = raw(client, facts.prompts[0], grammar="root ::= root", max_tokens=4)
        error = await failure(call)
        assert error.code() in (
            grpc.StatusCode.FAILED_PRECONDITION,
            grpc.StatusCode.INVALID_ARGUMENT,
        )
        if error.code() is grpc.StatusCode.FAILED_PRECONDITION:
            trailers = dict(error.trailing_metadata() or ())
            assert trailers["smg-constraint-failed"] == "engine"
        (end,) = await raw(client, facts.prompts[0], regex="[0-9]{3}", max_tokens=8)
        assert end.output_ids


class TestFields:
    async def test_a_seed_repeats_each_of_three_choices(
        self, client: VllmClient, facts: Facts
    ) -> None:
        params = Params(temperature=1.0, seed=11, n=3, max_tokens=10)
        runs = [
            [one.token_ids for one in await answers(call, choices=3)]
            for call in (
                client.generate(facts.prompts[0], params),
                client.generate(facts.prompts[0], params, stream=False),
            )
        ]
        assert runs[0] == runs[1]
        assert len({tuple(choice) for choice in runs[0]}) == 3

    async def test_a_seed_of_minus_one_is_random(self, client: VllmClient, facts: Facts) -> None:
        params = Params(temperature=1.5, seed=-1, max_tokens=16)
        found = [await answer(client.generate(facts.prompts[0], params)) for _ in range(3)]
        assert len({tuple(one.token_ids) for one in found}) > 1

    async def test_min_tokens_hold_back_every_stop_but_the_length(
        self, client: VllmClient, facts: Facts
    ) -> None:
        whole = (await answer(client.generate(facts.prompts[0], Params(max_tokens=12)))).token_ids
        (early,) = await raw(
            client, facts.prompts[0], max_tokens=12, stop_token_ids=whole[1:2], min_tokens=0
        )
        assert list(early.output_ids) == whole[: whole.index(whole[1]) + 1]
        assert early.matched_token_id == whole[1]
        (late,) = await raw(
            client, facts.prompts[0], max_tokens=12, stop_token_ids=whole[1:2], min_tokens=6
        )
        assert len(late.output_ids) >= 6

    async def test_a_truncated_prompt_is_its_last_tokens(
        self, client: VllmClient, facts: Facts
    ) -> None:
        prompt = list(facts.prompts[0])
        (short,) = await raw(client, prompt[-5:], max_tokens=6)
        (cut,) = await raw(client, prompt, max_tokens=6, truncate_prompt_tokens=5)
        assert cut.output_ids == short.output_ids
        assert cut.prompt_tokens == short.prompt_tokens == 5
        # Too long for the context, were it not for this.
        long = [prompt[0]] * facts.context + prompt
        (fitted,) = await raw(client, long, max_tokens=1, truncate_prompt_tokens=len(prompt))
        (whole,) = await raw(client, prompt, max_tokens=1)
        assert fitted.output_ids == whole.output_ids

    async def test_a_prompt_seen_before_comes_from_the_cache(
        self, client: VllmClient, facts: Facts
    ) -> None:
        # Whole blocks of 32 tokens are kept; no other test has this prompt.
        prompt = [7, 77, 777, *list(facts.prompts[0]) * 8][:100]
        (first,) = await raw(client, prompt, max_tokens=2)
        second = await raw(client, prompt, max_tokens=2, stream=True)
        assert first.cached_tokens == 0
        assert {message.cached_tokens for message in second} == {96}

    async def test_the_matched_text_is_in_the_tokens_whatever_is_asked_of_it(
        self, client: VllmClient, facts: Facts
    ) -> None:
        assert facts.decode is not None
        whole = (await answer(client.generate(facts.prompts[0], Params(max_tokens=8)))).token_ids
        stop = facts.decode(whole[3:4]).strip()
        for included in (True, False):
            (end,) = await raw(
                client,
                facts.prompts[0],
                max_tokens=8,
                stop=[stop],
                include_stop_str_in_output=included,
            )
            assert end.matched_stop_str == stop
            assert facts.decode(end.output_ids).rstrip().endswith(stop)

    async def test_a_bias_forces_and_bans(self, client: VllmClient, facts: Facts) -> None:
        said = (await answer(client.generate(facts.prompts[0], Params(max_tokens=1)))).token_ids
        (forced,) = await raw(client, facts.prompts[0], max_tokens=3, logit_bias={42: 100.0})
        assert list(forced.output_ids) == [42] * 3
        (banned,) = await raw(client, facts.prompts[0], max_tokens=1, logit_bias={said[0]: -100.0})
        assert list(banned.output_ids) != said

    async def test_the_end_of_a_stream_is_the_same_as_vllms_wire_has_it(
        self, client: VllmClient, facts: Facts
    ) -> None:
        (*chunks, end) = await raw(client, facts.prompts[0], stream=True, max_tokens=4, logprobs=2)
        assert sum(chunk.completion_tokens for chunk in chunks) == 4
        assert end.output_ids == chunks[-1].token_ids
        assert end.output_logprobs == chunks[-1].output_logprobs
        assert end.completion_tokens == len(end.output_ids)
        assert end.finish_reason == "length"
        assert end.WhichOneof("matched_stop") is None

    async def test_the_engine_is_empty_after_all_kinds_of_ends(
        self, client: VllmClient, facts: Facts, lane: Lane
    ) -> None:
        long = Params(temperature=1.0, max_tokens=None, n=2)
        left = client.generate(facts.prompts[0], long)
        ids = [f"empty-{number}" for number in range(3)]
        calls = [client.generate(facts.prompts[0], long, request_id=name) for name in ids]
        reading = [asyncio.ensure_future(answers(call, choices=2)) for call in calls]
        late = client.generate(facts.prompts[0], replace(long, n=1), timeout=1.0)
        assert (await failure(answer(late))).code() is grpc.StatusCode.DEADLINE_EXCEEDED
        left.cancel()
        for name in ids:
            await client.abort(name)
        await asyncio.gather(*reading)

        async def empty() -> bool:
            text = await asyncio.to_thread(scrape, lane.metrics_port)
            lines = [
                line
                for line in text.splitlines()
                if line.startswith(("vllm:num_requests_running{", "vllm:num_requests_waiting{"))
            ]
            assert len(lines) == 2
            return all(float(line.rsplit(" ", 1)[1]) == 0 for line in lines)

        # vLLM's gauges follow its steps: one more makes them say what is so now.
        await answer(client.generate(facts.prompts[0], Params(max_tokens=1)))
        await eventually(empty, 15, "no sequence in the engine")

    async def test_an_embedding_needs_a_model_served_for_it(
        self, client: VllmClient, facts: Facts
    ) -> None:
        request = pb.EmbedRequest(tokenized=pb.TokenizedInput(input_ids=facts.prompts[0]))
        error = await failure(client.stub.Embed(request))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "pooling" in (error.details() or "")


@pytest.mark.slow
@pytest.mark.timeout(900)
class TestEmbed:
    async def test_a_vector_is_vllms_own(
        self, demo_model: str, connect: Connect, tmp_path: Path
    ) -> None:
        driver = VllmDriver(demo_model, "--runner", "pooling", "--convert", "embed")
        prompts = [list(prompt) for prompt in driver.facts.prompts]
        expected = await asyncio.to_thread(
            reference, demo_model, "embed", prompts, tmp_path / "embed.json"
        )
        with start(driver) as worker:
            worker.until_serving(driver.boot_seconds)
            stub = VllmClient(connect.channel(worker)).stub

            async def embed(ids: list[int]) -> Any:
                tokenized = pb.TokenizedInput(input_ids=ids)
                return await stub.Embed(pb.EmbedRequest(tokenized=tokenized))

            for found, prompt, vector in zip(
                await asyncio.gather(*map(embed, prompts)), prompts, expected, strict=True
            ):
                assert found.prompt_tokens == len(prompt)
                assert found.embedding_dim == len(found.embedding) == len(vector)
                assert list(found.embedding) == pytest.approx(vector, abs=TOLERANCE)
            for ids, word in (
                ([], "at least one"),
                ([1] * 2049, "2048"),
                ([driver.facts.vocabulary], "vocabulary"),
            ):
                error = await failure(embed(ids))
                assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
                assert word in (error.details() or "")
            error = await failure(
                answer(VllmClient(connect.channel(worker)).generate(prompts[0], Params()))
            )
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert "generation" in (error.details() or "")

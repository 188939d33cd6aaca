"""Logprobs, stops and seeds."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from tests.conformance.driver import Params
from tests.conformance.reading import answer

if TYPE_CHECKING:
    from tests.conformance.driver import Client, Driver, Facts


class TestLogprobs:
    async def test_none_asked_none_given(self, client: Client, facts: Facts) -> None:
        for stream in (True, False):
            found = await answer(client.generate(facts.prompts[0], Params(), stream=stream))
            assert found.logprobs is None

    async def test_zero_is_the_chosen_token_alone(self, client: Client, facts: Facts) -> None:
        for stream in (True, False):
            params = Params(logprobs=0)
            found = await answer(client.generate(facts.prompts[0], params, stream=stream))
            assert found.logprobs is not None
            assert found.logprobs.token_ids == found.token_ids
            assert len(found.logprobs.values) == len(found.token_ids)
            assert not any(found.logprobs.top)

    @pytest.mark.parametrize("count", [1, 5, "most"])
    async def test_alternatives_come_best_first_with_the_greedy_choice_on_top(
        self, client: Client, facts: Facts, driver: Driver, count: int | str
    ) -> None:
        wanted = driver.capabilities.most_logprobs if count == "most" else int(count)
        params = Params(logprobs=wanted)
        found = await answer(client.generate(facts.prompts[0], params))
        assert found.logprobs is not None
        rows = zip(found.token_ids, found.logprobs.values, found.logprobs.top, strict=True)
        for token_id, value, top in rows:
            assert len({alternative for alternative, _ in top}) == len(top) == wanted
            values = [logprob for _, logprob in top]
            assert values == sorted(values, reverse=True)
            assert top[0][0] == token_id
            assert top[0][1] == pytest.approx(value, abs=1e-4)
            assert all(math.isfinite(logprob) and logprob <= 1e-4 for logprob in values)

    async def test_a_stream_has_the_logprobs_of_the_whole_answer(
        self, client: Client, facts: Facts, driver: Driver
    ) -> None:
        params = Params(logprobs=3)
        streamed = (await answer(client.generate(facts.prompts[1], params))).logprobs
        whole = (await answer(client.generate(facts.prompts[1], params, stream=False))).logprobs
        assert streamed is not None
        assert whole is not None
        assert streamed.token_ids == whole.token_ids
        tolerance = driver.capabilities.repeatable_logprobs
        assert streamed.values == pytest.approx(whole.values, abs=tolerance)
        assert [top[0][0] for top in streamed.top] == [top[0][0] for top in whole.top]


class TestStops:
    async def test_a_stop_token_is_the_last_of_the_answer_and_is_named(
        self, client: Client, facts: Facts
    ) -> None:
        whole = (await answer(client.generate(facts.prompts[0], Params(max_tokens=12)))).token_ids
        stop = next(token for token in whole[2:] if token not in whole[:2])
        params = Params(max_tokens=12, stop_token_ids=(stop,))
        for stream in (True, False):
            found = await answer(client.generate(facts.prompts[0], params, stream=stream))
            assert found.token_ids == whole[: whole.index(stop) + 1]
            assert found.reason == "stop"
            assert found.end.matched == stop

    async def test_a_stop_string_ends_the_answer_with_the_token_that_completes_it(
        self, client: Client, facts: Facts, driver: Driver
    ) -> None:
        if not driver.capabilities.string_stops:
            pytest.skip("this wire has no string stops")
        assert facts.decode is not None
        whole = (await answer(client.generate(facts.prompts[0], Params(max_tokens=12)))).token_ids
        # From the middle of one token to the middle of the next.
        stop = facts.decode(whole[3:5])[1:-1]
        ends = [n for n in range(1, 13) if stop in facts.decode(whole[:n])]
        params = Params(max_tokens=12, stop=("never said", stop))
        for stream in (True, False):
            found = await answer(client.generate(facts.prompts[0], params, stream=stream))
            assert found.token_ids == whole[: ends[0]]
            assert found.reason == "stop"
            assert found.end.matched == stop

    async def test_a_stop_string_that_is_never_said_stops_nothing(
        self, client: Client, facts: Facts, driver: Driver
    ) -> None:
        if not driver.capabilities.string_stops:
            pytest.skip("this wire has no string stops")
        params = Params(stop=("never said by anyone",))
        found = await answer(client.generate(facts.prompts[0], params))
        assert (len(found.token_ids), found.reason, found.end.matched) == (8, "length", None)

    async def test_a_length_limit_names_nothing(self, client: Client, facts: Facts) -> None:
        found = await answer(client.generate(facts.prompts[0], Params(max_tokens=5)))
        assert (len(found.token_ids), found.reason, found.end.matched) == (5, "length", None)

    async def test_a_stop_token_that_is_never_said_stops_nothing(
        self, client: Client, facts: Facts
    ) -> None:
        said = (await answer(client.generate(facts.prompts[0], Params()))).token_ids
        other = next(token for token in range(facts.vocabulary) if token not in said)
        found = await answer(client.generate(facts.prompts[0], Params(stop_token_ids=(other,))))
        assert found.token_ids == said
        assert found.reason == "length"

    async def test_the_end_of_the_sequence_stops_unless_it_is_ignored(
        self, client: Client, facts: Facts
    ) -> None:
        forced = Params(max_tokens=4, logit_bias={facts.end_of_sequence: 100.0})
        ended = await answer(client.generate(facts.prompts[0], replace(forced, ignore_eos=False)))
        assert ended.reason == "stop"
        assert len(ended.token_ids) <= 1
        assert ended.end.matched in (None, facts.end_of_sequence)
        ignored = await answer(client.generate(facts.prompts[0], forced))
        assert (ignored.reason, len(ignored.token_ids)) == ("length", 4)

    @pytest.mark.slow
    @pytest.mark.timeout(900)
    async def test_no_limit_is_what_the_context_has_left(
        self, client: Client, facts: Facts
    ) -> None:
        # Almost no room, so that the end is near.
        prompt = [facts.prompts[0][0]] * (facts.context - 3)
        found = await answer(client.generate(prompt, Params(max_tokens=None)), patience=600)
        assert (len(found.token_ids), found.reason) == (3, "length")


class TestSeeds:
    @pytest.mark.parametrize("seed", [0, 1, 42, 2**31 - 1])
    async def test_a_seed_repeats_its_answer(self, client: Client, facts: Facts, seed: int) -> None:
        params = Params(temperature=1.0, seed=seed, max_tokens=10)
        found = [
            (await answer(client.generate(facts.prompts[0], params))).token_ids for _ in range(3)
        ]
        assert found[0] == found[1] == found[2]

    async def test_a_seed_repeats_its_answer_in_company(self, client: Client, facts: Facts) -> None:
        params = Params(temperature=1.0, seed=7, max_tokens=10)
        alone = (await answer(client.generate(facts.prompts[0], params))).token_ids
        company = [
            answer(client.generate(facts.prompts[1], replace(params, seed=other, max_tokens=20)))
            for other in range(4)
        ]
        together, *_ = await asyncio.gather(
            answer(client.generate(facts.prompts[0], params)), *company
        )
        assert together.token_ids == alone

    async def test_different_seeds_differ(self, client: Client, facts: Facts) -> None:
        found = set()
        for seed in range(5):
            params = Params(temperature=1.0, seed=seed, max_tokens=10)
            found.add(tuple((await answer(client.generate(facts.prompts[0], params))).token_ids))
        assert len(found) > 1

    async def test_no_seed_is_another_answer_each_time(self, client: Client, facts: Facts) -> None:
        params = Params(temperature=1.5, max_tokens=16)
        found = {
            tuple((await answer(client.generate(facts.prompts[0], params))).token_ids)
            for _ in range(4)
        }
        assert len(found) > 1

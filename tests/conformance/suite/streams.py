"""What a stream says, and that it says the same as the whole answer."""

from __future__ import annotations

import asyncio
import itertools
from typing import TYPE_CHECKING

import pytest
from tests.conformance.driver import Params
from tests.conformance.reading import answer, answers, idle

if TYPE_CHECKING:
    from tests.conformance.driver import Client, Driver, Facts


class TestStreams:
    async def test_a_streamed_answer_is_the_whole_answer_in_parts(
        self, client: Client, facts: Facts
    ) -> None:
        for prompt in facts.prompts:
            streamed = await answer(client.generate(prompt, Params(max_tokens=12)))
            whole = await answer(client.generate(prompt, Params(max_tokens=12), stream=False))
            assert streamed.token_ids == whole.token_ids
            assert len(whole.token_ids) == 12
            assert streamed.chunks > 1
            assert whole.chunks == 0
            assert streamed.end.token_ids == []

    async def test_the_counts_are_those_of_the_prompt_and_the_answer(
        self, client: Client, facts: Facts
    ) -> None:
        for stream in (True, False):
            for prompt in facts.prompts:
                end = (await answer(client.generate(prompt, Params(), stream=stream))).end
                assert end.prompt_tokens == len(prompt)
                assert end.completion_tokens == 8
                assert 0 <= end.cached_tokens < len(prompt)

    async def test_a_single_token_is_an_answer(self, client: Client, facts: Facts) -> None:
        for stream in (True, False):
            found = await answer(
                client.generate(facts.prompts[0], Params(max_tokens=1), stream=stream)
            )
            assert len(found.token_ids) == 1
            assert found.reason == "length"

    async def test_many_streams_at_once_give_what_each_gives_alone(
        self, client: Client, facts: Facts, driver: Driver
    ) -> None:
        alone = [await answer(client.generate(prompt, Params())) for prompt in facts.prompts]
        calls = [
            answer(client.generate(prompt, Params())) for _ in range(4) for prompt in facts.prompts
        ]
        for number, found in enumerate(await asyncio.gather(*calls)):
            assert found.token_ids == alone[number % len(alone)].token_ids
        await idle(client, driver.settle_seconds)

    async def test_each_of_n_choices_ends_once(
        self, client: Client, facts: Facts, driver: Driver
    ) -> None:
        if not driver.capabilities.n:
            pytest.skip("this wire has no n")
        for stream in (True, False):
            params = Params(temperature=1.0, n=3)
            found = await answers(
                client.generate(facts.prompts[0], params, stream=stream), choices=3
            )
            assert [len(choice.token_ids) for choice in found] == [8, 8, 8]

    async def test_the_choices_of_a_stream_come_side_by_side(
        self, client: Client, facts: Facts, driver: Driver
    ) -> None:
        if not driver.capabilities.n:
            pytest.skip("this wire has no n")
        params = Params(temperature=1.0, n=3, seed=5)
        order = [event.index async for event in client.generate(facts.prompts[0], params)]
        # One after the other would be three runs of one index each.
        changes = sum(before != after for before, after in itertools.pairwise(order))
        assert changes > 4

    async def test_an_aborted_request_ends_each_of_its_choices(
        self, client: Client, facts: Facts, driver: Driver
    ) -> None:
        if not driver.capabilities.n:
            pytest.skip("this wire has no n")
        params = Params(temperature=1.0, n=3, max_tokens=None)
        for stream in (True, False):
            call = client.generate(facts.prompts[0], params, request_id="three", stream=stream)
            reading = asyncio.ensure_future(answers(call, choices=3))
            await asyncio.sleep(1.0)
            await client.abort("three")
            found = await asyncio.wait_for(reading, driver.settle_seconds)
            assert [choice.reason for choice in found] == ["abort"] * 3
            assert all(choice.token_ids for choice in found)
        await idle(client, driver.settle_seconds)

"""Each way in which a request can end, and that nothing of it is left."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import grpc
import pytest
from tests.conformance.driver import Complete, Params
from tests.conformance.reading import answer, begun, eventually, failure, idle

if TYPE_CHECKING:
    from tests.conformance.driver import Call, Client, Driver, Facts
    from tests.conformance.fixtures import Connect
    from tests.support.processes import Process

LONG = Params(max_tokens=None)


async def end_of(call: Call) -> Complete:
    """The last event of a call that ends in order."""
    last = None
    async for event in call:
        last = event
    assert isinstance(last, Complete)
    return last


class TestEnds:
    @pytest.fixture(autouse=True)
    async def _leaves_nothing_and_serves_on(
        self, client: Client, facts: Facts, driver: Driver
    ) -> object:
        before = await answer(client.generate(facts.prompts[0], Params()))
        yield
        await idle(client, driver.settle_seconds)
        after = await answer(client.generate(facts.prompts[0], Params()))
        assert after.token_ids == before.token_ids

    async def test_an_aborted_stream_ends_in_order_and_at_once(
        self, client: Client, facts: Facts, driver: Driver
    ) -> None:
        call = client.generate(facts.prompts[0], LONG, request_id="to-abort")
        await begun(call)
        began = time.monotonic()
        live = await client.abort("to-abort")
        assert live is (True if driver.capabilities.abort_answers else None)
        end = await asyncio.wait_for(end_of(call), driver.settle_seconds)
        assert time.monotonic() - began < driver.settle_seconds / 2
        assert end.finish_reason == "abort"
        assert end.completion_tokens >= 1
        assert end.prompt_tokens == len(facts.prompts[0])

    async def test_an_aborted_unary_request_gives_what_it_has(
        self, client: Client, facts: Facts, driver: Driver
    ) -> None:
        call = client.generate(facts.prompts[0], LONG, request_id="to-abort", stream=False)
        waiting = asyncio.ensure_future(answer(call))

        async def admitted() -> bool:
            return await client.active() == 1

        await eventually(admitted, driver.settle_seconds, "the request is active")
        await asyncio.sleep(0.3)
        await client.abort("to-abort")
        found = await asyncio.wait_for(waiting, driver.settle_seconds)
        assert found.reason == "abort"

    async def test_aborting_an_unknown_id_touches_nothing(
        self, client: Client, facts: Facts, driver: Driver
    ) -> None:
        running = client.generate(facts.prompts[0], Params(max_tokens=24), request_id="alive")
        await begun(running)
        for unknown in ("no-such-request", "aliv", "alive-", ""):
            live = await client.abort(unknown)
            assert live is (False if driver.capabilities.abort_answers else None)
        assert (await end_of(running)).finish_reason == "length"

    async def test_aborting_an_ended_id_touches_nothing(
        self, client: Client, facts: Facts, driver: Driver
    ) -> None:
        await answer(client.generate(facts.prompts[0], Params(), request_id="ended"))
        live = await client.abort("ended")
        assert live is (False if driver.capabilities.abort_answers else None)

    async def test_aborting_one_request_leaves_the_other_whole(
        self, client: Client, facts: Facts
    ) -> None:
        first = client.generate(facts.prompts[0], LONG, request_id="one")
        second = client.generate(facts.prompts[1], Params(max_tokens=24), request_id="one-more")
        await begun(first)
        await begun(second)
        await client.abort("one")
        assert (await end_of(first)).finish_reason == "abort"
        end = await end_of(second)
        assert (end.finish_reason, end.completion_tokens) == ("length", 24)

    async def test_a_client_that_cancels_frees_the_engine(
        self, client: Client, facts: Facts, driver: Driver
    ) -> None:
        for started in (True, False):
            for stream in (True, False):
                call = client.generate(facts.prompts[0], LONG, stream=stream)
                if started and stream:
                    await begun(call)
                elif started:
                    await asyncio.sleep(0.2)
                call.cancel()
                await idle(client, driver.settle_seconds)

    async def test_a_client_that_vanishes_frees_the_engine(
        self, client: Client, facts: Facts, driver: Driver, connect: Connect, worker: Process
    ) -> None:
        channel = connect.channel(worker, ("grpc.use_local_subchannel_pool", 1))
        calls = [driver.client(channel).generate(facts.prompts[0], LONG) for _ in range(3)]
        for call in calls:
            await begun(call)
        await channel.close()
        await idle(client, driver.settle_seconds)

    async def test_a_deadline_ends_the_call_and_frees_the_engine(
        self, client: Client, facts: Facts
    ) -> None:
        for stream in (True, False):
            call = client.generate(facts.prompts[0], LONG, stream=stream, timeout=0.5)
            began = time.monotonic()
            error = await failure(answer(call))
            assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            assert time.monotonic() - began < 3

    async def test_a_hundred_short_lives_leave_nothing(
        self, client: Client, facts: Facts, driver: Driver
    ) -> None:
        async def one(number: int) -> None:
            call = client.generate(facts.prompts[number % 3], LONG, request_id=f"short-{number}")
            await asyncio.sleep(0.01 * (number % 7))
            if number % 2:
                call.cancel()
            else:
                await client.abort(f"short-{number}")
                await asyncio.sleep(0.05)
                call.cancel()

        for wave in range(10):
            await asyncio.gather(*(one(10 * wave + number) for number in range(10)))
        await idle(client, driver.settle_seconds)

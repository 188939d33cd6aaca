"""Request ids: the client's names, unique while they live."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import grpc
from tests.conformance.driver import Params
from tests.conformance.reading import answer, begun, failure, idle
from tests.conformance.suite.ends import LONG, end_of

if TYPE_CHECKING:
    from tests.conformance.driver import Client, Driver, Facts


class TestIds:
    async def test_a_live_id_is_refused_and_the_first_request_goes_on(
        self, client: Client, facts: Facts
    ) -> None:
        first = client.generate(facts.prompts[0], Params(max_tokens=32), request_id="twin")
        await begun(first)
        for stream in (True, False):
            second = client.generate(facts.prompts[1], Params(), request_id="twin", stream=stream)
            error = await failure(answer(second))
            assert error.code() is grpc.StatusCode.ALREADY_EXISTS
            assert "twin" in (error.details() or "")
        end = await end_of(first)
        assert (end.finish_reason, end.completion_tokens) == ("length", 32)

    async def test_empty_ids_do_not_collide(self, client: Client, facts: Facts) -> None:
        calls = [answer(client.generate(facts.prompts[0], Params())) for _ in range(4)]
        found = await asyncio.gather(*calls)
        assert len({tuple(one.token_ids) for one in found}) == 1

    async def test_an_id_may_be_used_again_as_soon_as_its_end_was_read(
        self, client: Client, facts: Facts
    ) -> None:
        params = Params(max_tokens=2)
        for _ in range(10):
            found = await answer(client.generate(facts.prompts[0], params, request_id="again"))
            assert found.reason == "length"

    async def test_an_id_may_be_used_again_as_soon_as_it_is_aborted(
        self, client: Client, facts: Facts, driver: Driver
    ) -> None:
        for _ in range(3):
            first = client.generate(facts.prompts[0], LONG, request_id="again")
            await begun(first)
            await client.abort("again")
            second = await answer(client.generate(facts.prompts[1], Params(), request_id="again"))
            assert second.reason == "length"
            assert (await end_of(first)).finish_reason == "abort"
        await idle(client, driver.settle_seconds)

    async def test_ids_of_any_letters_are_names(self, client: Client, facts: Facts) -> None:
        for request_id in ("ü/é 漢字 \n", "x" * 4096, "../../etc", "%s{}"):
            found = await answer(
                client.generate(facts.prompts[0], Params(max_tokens=2), request_id=request_id)
            )
            assert found.reason == "length"

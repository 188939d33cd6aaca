"""Every bad value is the caller's fault, by name, and costs the engine nothing."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import grpc
from tests.conformance.driver import Params
from tests.conformance.reading import PATIENCE, answer, idle

if TYPE_CHECKING:
    from tests.conformance.driver import Client, Driver, Facts, Refusal


class TestRefusals:
    async def test_each_bad_value_is_refused_by_field_value_and_limit(
        self, client: Client, facts: Facts, driver: Driver
    ) -> None:
        before = await answer(client.generate(facts.prompts[0], Params()))
        table = driver.refusals()
        assert len({case.name for case in table}) == len(table) >= 20
        complaints = [complaint for case in table for complaint in await _complaints(client, case)]
        assert complaints == []
        await idle(client, driver.settle_seconds)
        after = await answer(client.generate(facts.prompts[0], Params()))
        assert after.token_ids == before.token_ids

    async def test_bad_values_do_not_disturb_a_running_stream(
        self, client: Client, facts: Facts, driver: Driver
    ) -> None:
        alone = await answer(client.generate(facts.prompts[0], Params(max_tokens=24)))
        running = asyncio.ensure_future(
            answer(client.generate(facts.prompts[0], Params(max_tokens=24)))
        )
        for case in driver.refusals():
            assert await _complaints(client, case) == []
        assert (await running).token_ids == alone.token_ids


async def _complaints(client: Client, case: Refusal) -> list[str]:
    try:
        await asyncio.wait_for(_read(client, case), PATIENCE)
    except grpc.aio.AioRpcError as error:
        details = error.details() or ""
        found = [
            f"{case.name}: {word!r} is not in {details!r}"
            for word in case.words
            if word not in details
        ]
        if error.code() is not grpc.StatusCode.INVALID_ARGUMENT:
            found.append(f"{case.name}: {error.code().name} {details!r}")
        if len(details) > 1000:
            found.append(f"{case.name}: {len(details)} characters")
        return found
    return [f"{case.name}: accepted"]


async def _read(client: Client, case: Refusal) -> None:
    async for _ in client.send(case.request):
        pass

"""Reads streams, and checks on the way what holds for every stream of every engine."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import grpc
import pytest
from tests.conformance.driver import Chunk, Complete

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tests.conformance.driver import Call, Client, TokenLogprobs

PATIENCE = 120.0


@dataclass
class Answer:
    """One choice, put together from its events."""

    token_ids: list[int]
    logprobs: TokenLogprobs | None
    end: Complete
    chunks: int

    @property
    def reason(self) -> str:
        return self.end.finish_reason


async def answers(call: Call, *, choices: int = 1, patience: float = PATIENCE) -> list[Answer]:
    """Read a call to its end."""
    return await asyncio.wait_for(_answers(call, choices), patience)


async def answer(call: Call, *, patience: float = PATIENCE) -> Answer:
    """Read a call with one choice to its end."""
    (only,) = await answers(call, patience=patience)
    return only


async def _answers(call: Call, choices: int) -> list[Answer]:
    tokens: dict[int, list[int]] = {index: [] for index in range(choices)}
    logprobs: dict[int, list[TokenLogprobs]] = {index: [] for index in range(choices)}
    counts: dict[int, int] = dict.fromkeys(range(choices), 0)
    ends: dict[int, Complete] = {}
    async for event in call:
        assert event.index in tokens, f"choice {event.index} of {choices}"
        assert event.index not in ends, f"choice {event.index} goes on after its end"
        if isinstance(event, Chunk):
            assert event.token_ids, "a chunk without tokens"
            counts[event.index] += 1
        elif isinstance(event, Complete):
            ends[event.index] = event
        tokens[event.index] += event.token_ids
        # The counts on the wire are those of the ids on the wire.
        assert event.completion_tokens == len(tokens[event.index])
        if event.token_ids and event.logprobs is not None:
            assert event.logprobs.token_ids == event.token_ids
            logprobs[event.index].append(event.logprobs)
    assert sorted(ends) == list(range(choices)), "each choice ends once"
    return [
        Answer(tokens[index], _joined(logprobs[index]), ends[index], counts[index])
        for index in range(choices)
    ]


def _joined(parts: list[TokenLogprobs]) -> TokenLogprobs | None:
    if not parts:
        return None
    whole = type(parts[0])([], [], [])
    for part in parts:
        whole.token_ids.extend(part.token_ids)
        whole.values.extend(part.values)
        whole.top.extend(part.top)
    return whole


async def failure(work: Awaitable[object]) -> grpc.aio.AioRpcError:
    """Return the error with which a call ends."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await asyncio.wait_for(work, PATIENCE)
    details = caught.value.details() or ""
    assert "Traceback" not in details
    assert 'File "' not in details
    return caught.value


async def begun(call: Call) -> None:
    """Read the first event of a call that must be running; the rest is left to be read."""
    await asyncio.wait_for(call.__aiter__().__anext__(), PATIENCE)


async def eventually(check: Callable[[], Awaitable[bool]], seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not await check():
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
        await asyncio.sleep(0.02)


async def idle(client: Client, seconds: float) -> None:
    """Wait until the worker counts no request."""

    async def none_active() -> bool:
        return await client.active() == 0

    await eventually(none_active, seconds, "no request active")

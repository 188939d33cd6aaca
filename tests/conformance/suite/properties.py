"""Thousands of generated requests, valid and not, amid streams whose answers are known.

Whatever is asked, a request ends in order or by one of the statuses that are the caller's
business, the known answers stay right, and the worker keeps nothing.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from tests.conformance.driver import Params
from tests.conformance.reading import answers, idle

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.conformance.driver import Client, Driver, Facts
    from tests.conformance.fixtures import Connect
    from tests.support.processes import Process

BATCH = 8
ALLOWED = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.DEADLINE_EXCEEDED,
}


@dataclass(frozen=True)
class Request:
    prompt: Sequence[int]
    params: Params
    stream: bool
    # What the client does: reads to the end, or leaves, aborts or runs out of time.
    end: str


@dataclass
class Tally:
    """What became of the requests."""

    ran: int = 0
    refused: int = 0
    left: int = 0
    wrong: list[str] = field(default_factory=list)

    @property
    def total(self) -> int:
        return self.ran + self.refused + self.left


def _ordinary(facts: Facts) -> dict[str, st.SearchStrategy[Any]]:
    """Values that every engine takes."""
    token = st.integers(0, facts.vocabulary - 1)
    return {
        "max_tokens": st.integers(1, 6),
        "temperature": st.one_of(st.none(), st.just(0.0), st.floats(0, 2, width=32)),
        "seed": st.one_of(st.none(), st.integers(0, 2**31 - 1)),
        "logprobs": st.one_of(st.none(), st.integers(0, 5)),
        "stop_token_ids": st.lists(token, max_size=3).map(tuple),
        "ignore_eos": st.booleans(),
        "top_p": st.floats(0, 1, width=32),
        "top_k": st.one_of(st.just(0), st.integers(0, 100)),
        "min_p": st.floats(0, 1, width=32),
        "repetition_penalty": st.floats(0, 2, width=32),
        "frequency_penalty": st.floats(-2, 2, width=32),
        "presence_penalty": st.floats(-2, 2, width=32),
        "logit_bias": st.dictionaries(token, st.floats(-100, 100, width=32), max_size=4),
    }


def _wild(facts: Facts) -> dict[str, st.SearchStrategy[Any]]:
    """Whatever the wire can carry: some of it is valid, and most is not."""
    number = st.floats(width=32)
    token = st.one_of(st.integers(0, 2**31 - 1), st.integers(0, facts.vocabulary))
    return {
        "prompt": st.lists(token, max_size=12),
        "max_tokens": st.just(0),
        "temperature": number,
        "seed": st.integers(-(2**31), 2**31 - 1),
        "logprobs": st.integers(-3, 500),
        "stop_token_ids": st.lists(token, max_size=3).map(tuple),
        "top_p": number,
        "top_k": st.integers(0, 2**31 - 1),
        "min_p": number,
        "repetition_penalty": number,
        "frequency_penalty": number,
        "presence_penalty": number,
        "logit_bias": st.dictionaries(token, number, max_size=4),
    }


@st.composite
def requests(draw: st.DrawFn, facts: Facts) -> Request:
    """A valid request, in about half of the cases with some values gone wild."""
    values = {name: draw(strategy) for name, strategy in _ordinary(facts).items()}
    token = st.integers(0, facts.vocabulary - 1)
    known = st.sampled_from([list(prompt) for prompt in facts.prompts])
    prompt = draw(st.one_of(known, st.lists(token, min_size=1, max_size=40)))
    if draw(st.booleans()):
        wild = _wild(facts)
        names = st.lists(st.sampled_from(sorted(wild)), min_size=1, max_size=2, unique=True)
        values |= {name: draw(wild[name]) for name in draw(names)}
    prompt = values.pop("prompt", prompt)
    end = draw(st.sampled_from(["read"] * 12 + ["cancel", "abort", "deadline"]))
    return Request(prompt, Params(**values), draw(st.booleans()), end)


class TestProperties:
    async def test_generated_requests_in_the_quick_lane(
        self, driver: Driver, connect: Connect, worker: Process
    ) -> None:
        await _storm(driver, connect, worker, 160)

    @pytest.mark.slow
    @pytest.mark.timeout(3600)
    async def test_thousands_of_generated_requests(
        self, driver: Driver, connect: Connect, worker: Process
    ) -> None:
        await _storm(driver, connect, worker, 2000)


async def _storm(driver: Driver, connect: Connect, worker: Process, count: int) -> None:
    """Run `count` generated requests against a worker; hypothesis keeps to a thread of its own."""
    facts, client = driver.facts, connect(worker)
    right = [
        (await answers(client.generate(prompt, Params())))[0].token_ids for prompt in facts.prompts
    ]
    # Lazily made things, caches and thread pools among them, are made by the first few.
    tally = Tally()
    batches = await asyncio.to_thread(_generate, facts, count)
    for batch in batches[:4]:
        await _batch(client, facts, right, batch, tally)
    await idle(client, driver.settle_seconds)
    before = _resources(worker)
    for batch in batches[4:]:
        await _batch(client, facts, right, batch, tally)
    await idle(client, driver.settle_seconds)
    assert tally.wrong == []
    assert tally.total >= count
    assert tally.ran >= 0.4 * tally.total, f"too few of them ran: {tally}"
    assert tally.refused > 0, f"none of them was refused: {tally}"
    after = [
        (await answers(client.generate(prompt, Params())))[0].token_ids for prompt in facts.prompts
    ]
    assert after == right
    descriptors, threads = _resources(worker)
    assert descriptors <= before[0] + 2
    assert threads <= before[1] + 2
    assert worker.process.poll() is None


def _generate(facts: Facts, count: int) -> list[list[Request]]:
    batches: list[list[Request]] = []

    @settings(
        max_examples=-(-count // BATCH),
        database=None,
        deadline=None,
        derandomize=False,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.lists(requests(facts), min_size=BATCH, max_size=BATCH))
    def collect(batch: list[Request]) -> None:
        batches.append(batch)

    collect()
    return batches


async def _batch(
    client: Client, facts: Facts, right: list[list[int]], batch: list[Request], tally: Tally
) -> None:
    """Run a batch at once, with one checked greedy stream in its midst."""
    place = len(batch) and tally.total % len(facts.prompts)
    known = asyncio.ensure_future(answers(client.generate(facts.prompts[place], Params())))
    await asyncio.gather(*(_one(client, request, tally) for request in batch))
    if (await known)[0].token_ids != right[place]:
        tally.wrong.append(f"a greedy stream was wrong amid {batch}")


async def _one(client: Client, request: Request, tally: Tally) -> None:
    request_id = f"storm-{id(request)}-{tally.total}" if request.end == "abort" else ""
    call = client.generate(
        request.prompt,
        request.params,
        stream=request.stream,
        request_id=request_id,
        timeout=0.05 if request.end == "deadline" else 120,
    )
    reading = asyncio.ensure_future(answers(call))
    if request.end in ("cancel", "abort"):
        await asyncio.sleep(0.02)
        if request.end == "cancel":
            call.cancel()
        else:
            await client.abort(request_id)
    try:
        (found,) = await reading
    except grpc.aio.AioRpcError as error:
        if error.code() not in ALLOWED:
            tally.wrong.append(f"{error.code().name} {error.details()!r} for {request}")
        if error.code() is grpc.StatusCode.INVALID_ARGUMENT:
            tally.refused += 1
        else:
            tally.left += 1
    except asyncio.CancelledError:
        tally.left += 1
    except Exception as error:  # every request is judged; the first must not hide the others
        tally.left += 1
        tally.wrong.append(f"{error!r} for {request}")
    else:
        if found.reason == "abort":
            tally.left += 1
        else:
            tally.ran += 1
        if len(found.token_ids) > (request.params.max_tokens or 0):
            tally.wrong.append(f"{len(found.token_ids)} tokens for {request}")


def _resources(worker: Process) -> tuple[int, int]:
    process = Path(f"/proc/{worker.process.pid}")
    return len(list((process / "fd").iterdir())), len(list((process / "task").iterdir()))

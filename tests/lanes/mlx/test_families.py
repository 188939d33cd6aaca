"""Model families that differ in what they keep of a prompt, and in where their config says what.

Random numbers make them: small, decided at every token, and different after each wrong state.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

import grpc
import pytest
from smg_grpc_proto.generated import mlx_engine_pb2 as pb
from smg_grpc_proto.generated import mlx_engine_pb2_grpc
from tests.conformance.driver import Params
from tests.conformance.fixtures import start
from tests.conformance.reading import answer, failure
from tests.lanes.mlx.driver import MlxDriver
from tests.lanes.mlx.library import VOCABULARY, WINDOW, Reference, references

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.conformance.fixtures import Connect
    from tests.lanes.mlx.conftest import Models
    from tests.support.processes import Process

pytestmark = pytest.mark.engine

TOKENS = 24
GREEDY = Params(max_tokens=TOKENS)


def ids(length: int, salt: int = 0) -> list[int]:
    return [(place * 37 + salt * 101 + 11) % 4000 + 10 for place in range(length)]


PROMPTS = [ids(5), ids(23, 1), ids(WINDOW + 40, 2), ids(WINDOW - 4, 3)]
# The start of a chat that is not asked alone before, and what comes after its first answer.
CHAT = ids(WINDOW + 20, 4)
TURN = CHAT + ids(31, 5)


@dataclass
class Family:
    name: str
    worker: Process
    references: list[Reference]


@pytest.fixture(scope="module", params=["recurrent", "hybrid", "nested-hybrid", "nested-window"])
def family(request: pytest.FixtureRequest, models: Models) -> Iterator[Family]:
    path = models(request.param)
    driver = MlxDriver(str(path))
    # Prompts are read in several steps, and the state between them is part of the matter.
    with start(driver, "--prefill-step-size", "32") as worker:
        known = references(path, [*PROMPTS, TURN], TOKENS)
        worker.until_serving(driver.boot_seconds)
        yield Family(request.param, worker, known)
        worker.signal()
        assert worker.wait(driver.boot_seconds) == 0


CONTEXTS = {
    "recurrent": 1 << 20,
    "hybrid": 2048,
    "nested-hybrid": 3072,
    "nested-window": 1024,
}


async def test_the_facts_are_found_wherever_the_config_has_them(
    family: Family, connect: Connect
) -> None:
    stub = mlx_engine_pb2_grpc.MlxEngineStub(connect.channel(family.worker))
    info = await stub.GetModelInfo(pb.GetModelInfoRequest())
    assert info.vocab_size == VOCABULARY
    assert info.max_context_length == CONTEXTS[family.name]
    expected = [2, 7] if family.name == "nested-window" else [2]
    assert list(info.eos_token_ids) == expected


async def test_greedy_alone_is_the_library_s_own(family: Family, connect: Connect) -> None:
    client = connect(family.worker)
    for prompt, reference in zip(PROMPTS, family.references, strict=False):
        reference.check((await answer(client.generate(prompt, GREEDY))).token_ids)


async def test_prompts_of_different_lengths_do_not_disturb_each_other(
    family: Family, connect: Connect
) -> None:
    client = connect(family.worker)
    calls = [answer(client.generate(prompt, GREEDY)) for prompt in PROMPTS * 2]
    found = await asyncio.gather(*calls)
    for each, reference in zip(found, family.references[: len(PROMPTS)] * 2, strict=True):
        reference.check(each.token_ids)


async def test_a_second_turn_goes_on_from_the_state_of_the_first(
    family: Family, connect: Connect
) -> None:
    client = connect(family.worker)
    first = await answer(client.generate(CHAT, GREEDY))
    assert first.end.cached_tokens == 0
    second = await answer(client.generate(TURN, GREEDY))
    # The first prompt's last token is read with the first step of its answer.
    assert second.end.cached_tokens == len(CHAT) - 1
    family.references[-1].check(second.token_ids)


async def test_learned_positions_are_never_left(models: Models, connect: Connect) -> None:
    context = 128
    driver = MlxDriver(str(models("learned-positions")))
    with start(driver) as worker:
        worker.until_serving(driver.boot_seconds)
        client = connect(worker)
        stub = mlx_engine_pb2_grpc.MlxEngineStub(connect.channel(worker))
        info = await stub.GetModelInfo(pb.GetModelInfoRequest())
        assert info.max_context_length == context
        full = await failure(answer(client.generate(ids(context), GREEDY)))
        assert full.code() is grpc.StatusCode.INVALID_ARGUMENT
        last = await answer(client.generate(ids(context - 4), Params(max_tokens=None)))
        assert (last.reason, len(last.token_ids)) == ("length", 4)
        # Far beyond what any tokens could stand for: refused unread.
        endless = await failure(answer(client.send(pb.GenerateRequest(text="a" * (1 << 20)))))
        assert endless.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert (endless.details() or "").startswith("text")
        assert "can fit the context" in (endless.details() or "")

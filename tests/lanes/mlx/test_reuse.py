"""What is kept of ended requests, as a client sees it, and within which bounds."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
from tests.conformance.driver import Params
from tests.conformance.fixtures import start
from tests.conformance.reading import answer
from tests.lanes.mlx.driver import MlxDriver
from tests.lanes.mlx.library import CONFIGS, references

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.conformance.driver import Client
    from tests.conformance.fixtures import Connect
    from tests.conformance.reading import Answer
    from tests.lanes.mlx.conftest import Models

pytestmark = pytest.mark.engine

LENGTH = 400
GREEDY = Params(max_tokens=12)
_CONFIG = CONFIGS["plain"]
# Keys and values of one token: of every layer and head, in 32 bits.
TOKEN_BYTES = (
    2
    * _CONFIG["num_hidden_layers"]
    * _CONFIG["num_key_value_heads"]
    * (_CONFIG["hidden_size"] // _CONFIG["num_attention_heads"])
    * 4
)


def ids(salt: int, length: int = LENGTH) -> list[int]:
    return [(place * 37 + salt * 101 + 11) % 4000 + 10 for place in range(length)]


@contextmanager
def serving(models: Models, connect: Connect, *options: str) -> Iterator[Client]:
    driver = MlxDriver(str(models("plain")))
    with start(driver, *options) as worker:
        worker.until_serving(driver.boot_seconds)
        yield connect(worker)


async def cached(client: Client, prompt: list[int]) -> int:
    return (await answer(client.generate(prompt, GREEDY))).end.cached_tokens


async def test_each_turn_of_a_chat_goes_on_from_the_last(models: Models, connect: Connect) -> None:
    prompt, asked = ids(1), ids(2, 30)
    (first,) = references(models("plain"), [prompt], 12)
    turn = [*prompt, *first.ids, *asked]
    (second,) = references(models("plain"), [turn], 12)
    with serving(models, connect) as client:

        async def ask(prompt: list[int]) -> Answer:
            return await answer(client.generate(prompt, GREEDY))

        read, again = await ask(prompt), await ask(prompt)
        assert (read.end.cached_tokens, again.end.cached_tokens) == (0, LENGTH - 1)
        first.check(read.token_ids)
        assert again.token_ids == read.token_ids
        found = await ask(turn)
        # The last token of an answer is said and not read.
        assert found.end.cached_tokens >= LENGTH + len(first.ids) - 1
        second.check(found.token_ids)
        # A fork from the middle of it.
        fork = [*prompt[:200], *asked]
        assert (await ask(fork)).end.cached_tokens == 200


async def test_a_budget_of_nothing_keeps_nothing(models: Models, connect: Connect) -> None:
    prompt = ids(1)
    (expected,) = references(models("plain"), [prompt], 12)
    with serving(models, connect, "--prefix-cache-bytes", "0") as client:
        for _ in range(2):
            found = await answer(client.generate(prompt, GREEDY))
            assert found.end.cached_tokens == 0
            expected.check(found.token_ids)


async def test_a_budget_for_one_prompt_keeps_the_latest(models: Models, connect: Connect) -> None:
    budget = str(TOKEN_BYTES * LENGTH * 3 // 2)
    with serving(models, connect, "--prefix-cache-bytes", budget) as client:
        assert await cached(client, ids(1)) == 0
        assert await cached(client, ids(1)) == LENGTH - 1
        assert await cached(client, ids(2)) == 0
        assert await cached(client, ids(1)) == 0
        assert await cached(client, ids(1)) == LENGTH - 1


async def test_a_prompt_beyond_the_budget_is_not_kept(models: Models, connect: Connect) -> None:
    budget = str(TOKEN_BYTES * LENGTH // 2)
    with serving(models, connect, "--prefix-cache-bytes", budget) as client:
        assert await cached(client, ids(3, 100)) == 0
        assert [await cached(client, ids(1)) for _ in range(2)] == [0, 0]
        # Nor does it drive out what is.
        assert await cached(client, ids(3, 100)) == 99

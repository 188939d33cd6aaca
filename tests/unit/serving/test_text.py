from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from smg_grpc_servicer.serving import text
from smg_wire.errors import InvalidRequest, Overloaded

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


class Tokenizer:
    """One token a character; counts how many threads are in it at once."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.threads: set[int] = set()
        self.gate = threading.Event()
        self.gate.set()

    def __call__(self, prompt: str) -> list[int]:
        self.threads.add(threading.get_ident())
        self.gate.wait(10)
        self.seen.append(prompt)
        return list(range(len(prompt)))


@pytest.fixture
def tokenizer() -> Tokenizer:
    return Tokenizer()


@pytest_asyncio.fixture
async def encoder(tokenizer: Tokenizer) -> AsyncIterator[text.TextInput]:
    made = text.TextInput(tokenizer, context=10, longest_token=3)
    yield made
    made.close()


async def test_all_texts_are_encoded_on_one_thread_that_is_not_the_loops(
    encoder: text.TextInput, tokenizer: Tokenizer
) -> None:
    found = await asyncio.gather(*(encoder.encode("x" * n) for n in range(5)))
    assert [len(ids) for ids in found] == [0, 1, 2, 3, 4]
    assert len(tokenizer.threads) == 1
    assert threading.get_ident() not in tokenizer.threads


async def test_a_text_that_cannot_fit_is_not_looked_at(
    encoder: text.TextInput, tokenizer: Tokenizer
) -> None:
    assert len(await encoder.encode("x" * 30)) == 30
    with pytest.raises(InvalidRequest, match="at most 30 can fit"):
        await encoder.encode("x" * 31)
    assert tokenizer.seen == ["x" * 30]


@pytest.mark.parametrize(
    ("keep", "looked_at"), [("left", "a" * 50 + "b" * 10), ("right", "b" * 10 + "c" * 50)]
)
async def test_of_a_text_that_is_truncated_only_what_can_be_kept_is_looked_at(
    encoder: text.TextInput, tokenizer: Tokenizer, keep: str, looked_at: str
) -> None:
    await encoder.encode("a" * 50 + "b" * 10 + "c" * 50, keep=keep)
    assert tokenizer.seen == [looked_at]


async def test_texts_that_wait_are_bounded(
    encoder: text.TextInput, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text, "_MOST_WAITING", 3)
    tokenizer.gate.clear()
    waiting = [asyncio.ensure_future(encoder.encode("x")) for _ in range(3)]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded, match="3 texts"):
        await encoder.encode("x")
    tokenizer.gate.set()
    await asyncio.gather(*waiting)
    assert await encoder.encode("x") == [0]

"""Text prompts: tokenized off the event loop, one at a time, with a bound on those that wait."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from smg_wire.errors import InvalidRequest, Measure, Overloaded

if TYPE_CHECKING:
    from collections.abc import Callable

# More than this many texts waiting for the one tokenizer is a queue that only grows.
_MOST_WAITING = 256


class TextInput:
    """Encodes prompts by `encode`, which is called on a thread of its own and nowhere else.

    `longest_token` is in characters: no token stands for more than the longest entry of the
    vocabulary has, so a longer text than that times the context cannot fit.
    """

    def __init__(
        self, encode: Callable[[str], list[int]], *, context: int, longest_token: int
    ) -> None:
        self._encode = encode
        self.most_characters = context * longest_token
        self._waiting = 0
        # A Hugging Face tokenizer must not be used by two threads at once ("Already borrowed").
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tokenize")

    async def encode(self, text: str, *, keep: str | None = None) -> list[int]:
        """Return the token ids of `text`.

        `keep` is the end ("left" or "right") of which no more is needed than can fill the
        context: the rest of a longer text is not looked at.

        Raises:
            InvalidRequest: the text is too long for the context whatever it holds.
            Overloaded: too many texts are waiting.
        """
        # Twice what can be needed: how a text splits depends a little on what stands before.
        if keep == "left":
            text = text[: 2 * self.most_characters]
        elif keep == "right":
            text = text[-2 * self.most_characters :]
        elif len(text) > self.most_characters:
            raise InvalidRequest(
                "text",
                Measure(f"{len(text)} characters"),
                f"at most {self.most_characters} can fit the context",
            )
        if self._waiting >= _MOST_WAITING:
            raise Overloaded(f"{self._waiting} texts wait for the tokenizer: the limit is reached")
        self._waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(
                self._thread, self._encode, text
            )
        finally:
            self._waiting -= 1

    def close(self) -> None:
        """Stop the thread; texts that wait are dropped."""
        self._thread.shutdown(wait=False, cancel_futures=True)

"""Text prompts: tokenized off the event loop, one at a time, with a bound on those that wait."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from smg_wire.errors import InvalidRequest, Overloaded

# More than this many texts waiting for the one tokenizer is a queue that only grows.
_MOST_WAITING = 256


class TextInput:
    """Encodes prompts with the model's tokenizer, as `mlx_lm.generate` does.

    The beginning-of-sequence token is added unless the text starts with it.
    """

    def __init__(self, tokenizer: Any, context: int) -> None:
        self._tokenizer = tokenizer
        # No token stands for more characters than the longest entry of the vocabulary has: a
        # longer text than that times the context cannot fit, and is not worth tokenizing.
        self._most_characters = context * max(map(len, tokenizer.get_vocab()))
        self._waiting = 0
        # A Hugging Face tokenizer must not be used by two threads at once ("Already borrowed").
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tokenize")

    async def encode(self, text: str) -> list[int]:
        """Return the token ids of `text`.

        Raises:
            InvalidRequest: the text is too long for the context whatever it holds.
            Overloaded: too many texts are waiting.
        """
        if len(text) > self._most_characters:
            raise InvalidRequest(
                "text",
                f"{len(text)} characters",
                f"at most {self._most_characters} can fit the context",
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

    def _encode(self, text: str) -> list[int]:
        bos = self._tokenizer.bos_token
        special = bos is None or not text.startswith(bos)
        return list(self._tokenizer.encode(text, add_special_tokens=special))

    def close(self) -> None:
        """Stop the thread; texts that wait are dropped."""
        self._thread.shutdown(wait=False, cancel_futures=True)

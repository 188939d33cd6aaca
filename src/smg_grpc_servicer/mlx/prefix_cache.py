"""Keeps the attention state of ended requests, for prompts that begin as they did.

The caches that mlx-lm makes are values: its arrays are never written in place once shared, and
a batch copies what it is given. So an entry may serve any number of requests at one time, each
through a copy that shares the entry's arrays.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Tokens = np.ndarray[Any, np.dtype[np.uint32]]
    PromptCache = list[Any]

# Reusing less than this costs more (padding beside others in the batch) than it saves.
_SHORTEST_REUSE = 16


@dataclass(slots=True)
class _Entry:
    tokens: Tokens
    cache: PromptCache
    nbytes: int


class PrefixCache:
    """A bounded set of token sequences with their attention state, least recently used out.

    Args:
        budget: bytes of arrays that the entries may hold together; 0 turns the cache off.
        settle: called with a cache that is to be kept, so that lazily cut arrays let go of the
            whole batch that they were cut from.
    """

    def __init__(self, budget: int, settle: Callable[[PromptCache], None]) -> None:
        self._budget = budget
        self._settle = settle
        self._entries: OrderedDict[int, _Entry] = OrderedDict()
        self._next = 0
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def enabled(self) -> bool:
        """Whether anything can be kept at all."""
        return self._budget > 0

    def lookup(self, prompt_ids: Sequence[int]) -> tuple[PromptCache | None, int]:
        """Return a cache for the start of a prompt, and how many of its tokens that covers.

        At least the prompt's last token is left to be read. The cache is the caller's own.
        """
        if not self._entries:
            return None, 0
        prompt = np.asarray(prompt_ids, dtype=np.uint32)
        usable = prompt[:-1]
        ranked = []
        for key, entry in self._entries.items():
            shared = _common_prefix(entry.tokens, usable)
            if shared >= _SHORTEST_REUSE:
                ranked.append((shared, key))
        # The longest first; one that cannot be trimmed gives way to a shorter whole prefix.
        for shared, key in sorted(ranked, reverse=True):
            entry = self._entries[key]
            cache = _trimmed(entry.cache, len(entry.tokens) - shared)
            if cache is not None:
                self._entries.move_to_end(key)
                return cache, shared
        return None, 0

    def insert(self, tokens: Sequence[int], cache: PromptCache) -> None:
        """Keep a cache that holds exactly these tokens; it is the prefix cache's from here on."""
        size = sum(_nbytes(layer) for layer in cache)
        if len(tokens) < _SHORTEST_REUSE or not 0 < size <= self._budget:
            return
        ids = np.asarray(tokens, dtype=np.uint32)
        trimmable = _can_trim(cache)
        for key, entry in list(self._entries.items()):
            shared = _common_prefix(entry.tokens, ids)
            if shared == len(ids) and (len(entry.tokens) == shared or _can_trim(entry.cache)):
                self._entries.move_to_end(key)
                return
            if trimmable and shared == len(entry.tokens):
                self._drop(key)
        self._settle(cache)
        self._entries[self._next] = _Entry(ids, cache, size)
        self._next += 1
        self.nbytes += size
        while self.nbytes > self._budget:
            self._drop(next(iter(self._entries)))

    def clear(self) -> None:
        """Let go of everything."""
        self._entries.clear()
        self.nbytes = 0

    def _drop(self, key: int) -> None:
        self.nbytes -= self._entries.pop(key).nbytes


def _common_prefix(a: Tokens, b: Tokens) -> int:
    length = min(len(a), len(b))
    # Most entries differ within their first tokens; those need no look at the rest.
    head = min(length, _SHORTEST_REUSE)
    if not np.array_equal(a[:head], b[:head]):
        return int(np.argmax(a[:head] != b[:head]))
    differs = a[:length] != b[:length]
    first = int(np.argmax(differs)) if length else 0
    return first if length and differs[first] else length


def _can_trim(cache: PromptCache) -> bool:
    return all(layer.is_trimmable() for layer in cache)


def _trimmed(cache: PromptCache, surplus: int) -> PromptCache | None:
    """Return a copy without its last `surplus` tokens, or None where that cannot be had.

    A copy shares the arrays, and trimming only moves its offset.
    """
    if not surplus:
        return copy.deepcopy(cache)
    if not _can_trim(cache):
        return None
    trimmed = copy.deepcopy(cache)
    # A chunked cache gives up less than it is asked for once it has dropped its front.
    if any(layer.trim(surplus) != surplus for layer in trimmed):
        return None
    return trimmed


def _nbytes(layer: Any) -> int:
    """Return the bytes of a layer's arrays as allocated, not as far as they are filled."""
    return int(layer.nbytes)

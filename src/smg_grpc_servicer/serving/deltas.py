"""What an engine says of a running request, in words that no engine owns.

An engine pushes `Delta`s into a `Sink`; a servicer turns them into its own wire's messages.
Two deltas of one choice that meet in a queue become one: merging is what lets a slow reader
cost fewer messages instead of more memory.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from smg_wire.errors import SmgError

STOP = "stop"
LENGTH = "length"
ABORT = "abort"


@dataclass(slots=True)
class Logprobs:
    """Natural-log probabilities of generated tokens, one entry a token.

    `top[i]` holds the alternatives of token i as (token id, logprob), best first; it is empty
    where none were asked for.
    """

    token_ids: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    top: list[list[tuple[int, float]]] = field(default_factory=list)

    def extend(self, later: Logprobs) -> None:
        """Append the entries of `later`."""
        self.token_ids += later.token_ids
        self.values += later.values
        self.top += later.top


@dataclass(slots=True, frozen=True)
class Finish:
    """Why a choice ended, and the stop token id or stop string that ended it, if one did.

    An end-of-sequence token and a length limit match nothing, unless the engine's wire says
    otherwise.
    """

    reason: str
    matched: int | str | None = None


class Extra(Protocol):
    """What one engine's wire carries beyond the others'."""

    def merge(self, later: Any) -> None:
        """Take in the extra of the delta that follows in the same choice."""


@dataclass(slots=True)
class Delta:
    """New tokens of one choice; counts are of the whole choice so far.

    `extra` is the engine's own: whatever its wire carries and no other does.
    `first_token_seconds` is how long the first token took, from an engine that hands over a whole
    answer at once; otherwise it is the time of the first push.
    """

    index: int
    token_ids: list[int]
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    logprobs: Logprobs | None = None
    finish: Finish | None = None
    extra: Extra | None = None
    first_token_seconds: float | None = None

    def merge(self, later: Delta) -> None:
        """Take in the delta that follows this one in the same choice."""
        self.token_ids += later.token_ids
        self.prompt_tokens = later.prompt_tokens
        self.completion_tokens = later.completion_tokens
        self.cached_tokens = later.cached_tokens
        self.finish = later.finish
        if self.logprobs is None:
            self.logprobs = later.logprobs
        elif later.logprobs is not None:
            self.logprobs.extend(later.logprobs)
        if self.extra is None:
            self.extra = later.extra
        elif later.extra is not None:
            self.extra.merge(later.extra)


class Sink(Protocol):
    """Where an engine puts what it has for one request. Called on the event loop's thread."""

    def push(self, delta: Delta) -> None:
        """Hand over new tokens; after the last choice's `finish` nothing more may come."""

    def fail(self, error: SmgError) -> None:
        """End the request with an error."""

"""What GetLoads and load records report of each data-parallel rank.

An engine's package feeds a `LoadBoard` with two things: every report that the engine makes of a
scheduler step (`observe`), and every request that it hands to the engine (`forwarded`). Anyone may
then read a `RankLoad`, in which None is "not known" and never 0.
"""

from __future__ import annotations

import math
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

# Tokens generated are averaged over so many seconds, and over one at least.
_WINDOW = 5.0
# The hit rate is of so many requests, as in vLLM's own log line.
_HIT_RATE_REQUESTS = 1000


@dataclass(frozen=True, slots=True)
class Capacity:
    """What one rank can hold; None where it is not known.

    Of `total_tokens`, `reserved_tokens` are in blocks that the engine keeps for itself: usage is
    of the rest. `reports_steps` says that the engine reports every scheduler step, those without
    a token too.
    """

    max_running: int | None = None
    total_tokens: int | None = None
    reserved_tokens: int = 0
    block_size: int = 1
    reports_steps: bool = False


@dataclass(frozen=True, slots=True)
class Step:
    """An engine's report of one scheduler step; `usage` is of the KV cache, in [0, 1].

    Counts of tokens and of prefix cache queries are of this step alone.
    """

    running: int
    waiting: int
    usage: float
    generated_tokens: int = 0
    cache_requests: int = 0
    cache_queries: int = 0
    cache_hits: int = 0
    cache_reset: bool = False
    active_usage: float | None = None


@dataclass(frozen=True, slots=True)
class RankLoad:
    """One rank's load now. Token counts are tokens, not blocks; rates are per second."""

    rank: int
    running: int
    waiting: int
    token_usage: float
    waiting_uncached_tokens: int | None
    prefill_pending_tokens: int | None
    active_token_usage: float | None
    gen_throughput: float
    cache_hit_rate: float | None
    used_tokens: int | None
    total_tokens: int | None
    max_running: int | None
    age_ms: int
    engine_silence_ms: int | None
    reports_steps: bool

    @property
    def core(self) -> tuple[object, ...]:
        """What a router decides by; a record is due when it changes."""
        return (
            self.running,
            self.waiting,
            self.waiting_uncached_tokens,
            self.prefill_pending_tokens,
            self.token_usage,
        )


class Forwarded:
    """A request in the engine's hands. Call `ended` once it is not, however that came."""

    __slots__ = ("_meter", "at", "every_step", "has_output", "prompt_tokens", "sequences")

    def __init__(
        self, meter: _RankMeter, prompt_tokens: int, sequences: int, *, every_step: bool, at: float
    ) -> None:
        self._meter = meter
        self.prompt_tokens = prompt_tokens
        self.sequences = sequences
        self.every_step = every_step
        self.at = at
        self.has_output = False

    def produced(self) -> None:
        """The request has output: its prompt is no longer work to come. Cheap when repeated."""
        if not self.has_output:
            self.has_output = True
            self._meter.no_longer_pending(self)

    def ended(self) -> None:
        """The engine no longer has the request."""
        self._meter.end(self)


class LoadBoard:
    """The loads of all ranks that one worker manages. Used on the event loop's thread alone.

    Args:
        capacities: by rank, as the engine numbers its data-parallel ranks globally.
        clock: seconds that never go back.
    """

    def __init__(
        self, capacities: dict[int, Capacity], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._meters = {
            rank: _RankMeter(rank, capacity, clock, self._changed)
            for rank, capacity in sorted(capacities.items())
        }
        # Requests whose rank the engine chooses; with one rank there is no question.
        self._unplaced = (
            next(iter(self._meters.values()))
            if len(self._meters) == 1
            else _RankMeter(-1, Capacity(), clock, lambda _rank: None)
        )
        self._listeners: list[Callable[[int], None]] = []

    @property
    def ranks(self) -> Iterable[int]:
        """The ranks managed here, in order."""
        return self._meters.keys()

    def subscribe(self, listener: Callable[[int], None]) -> Callable[[], None]:
        """Call `listener(rank)` whenever a rank's load may have changed; return what ends that."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    def observe(self, rank: int, step: Step) -> None:
        """Take the engine's report of a step; ranks not managed here are ignored."""
        meter = self._meters.get(rank)
        if meter is not None:
            meter.observe(step)

    def heard(self, rank: int) -> None:
        """Note that the rank gave output of whatever kind: it is not silent."""
        meter = self._meters.get(rank)
        if meter is not None:
            meter.heard()

    def forwarded(
        self,
        prompt_tokens: int,
        *,
        rank: int | None = None,
        sequences: int = 1,
        every_step: bool = True,
    ) -> Forwarded:
        """Note a request handed to the engine, whose rank is None where the engine chooses it.

        `every_step` is False for one that the engine is quiet about while it is healthy: one
        that does not stream, or streams at intervals.
        """
        meter = self._unplaced if rank is None else self._meters.get(rank, self._unplaced)
        return meter.forward(prompt_tokens, sequences, every_step=every_step)

    def load(self, rank: int) -> RankLoad | None:
        """Return a rank's load, or None if nothing is known of it.

        That is so for a rank not managed here, and for one whose engine reports no statistics.
        """
        meter = self._meters.get(rank)
        return None if meter is None else meter.load(complete=self._unplaced.is_idle_or(meter))

    def loads(self) -> list[RankLoad]:
        """Return the loads of all ranks of which something is known."""
        loads = (self.load(rank) for rank in self._meters)
        return [load for load in loads if load is not None]

    def _changed(self, rank: int) -> None:
        for listener in list(self._listeners):
            listener(rank)


class _RankMeter:
    """The figures of one rank."""

    def __init__(
        self,
        rank: int,
        capacity: Capacity,
        clock: Callable[[], float],
        changed: Callable[[int], None],
    ) -> None:
        self._rank = rank
        self._capacity = capacity
        self._clock = clock
        self._changed = changed
        self._step: Step | None = None
        self._step_at = 0.0
        self._heard_at = -math.inf
        self._generated: deque[tuple[float, int]] = deque()
        self._cached: deque[tuple[int, int, int]] = deque()
        self._cache_sums = (0, 0, 0)
        # Insertion order is the order of forwarding, which is the order of the engine's queue.
        self._in_flight: dict[Forwarded, None] = {}
        self._pending: dict[Forwarded, None] = {}
        self._pending_tokens = 0

    def observe(self, step: Step) -> None:
        now = self._clock()
        self._step, self._step_at, self._heard_at = step, now, now
        if step.generated_tokens:
            self._generated.append((now, step.generated_tokens))
        self._prune(now)
        if step.cache_reset:
            self._cached.clear()
            self._cache_sums = (0, 0, 0)
        if step.cache_requests:
            self._add_cached(step.cache_requests, step.cache_queries, step.cache_hits)
        self._changed(self._rank)

    def heard(self) -> None:
        self._heard_at = self._clock()

    def forward(self, prompt_tokens: int, sequences: int, *, every_step: bool) -> Forwarded:
        request = Forwarded(self, prompt_tokens, sequences, every_step=every_step, at=self._clock())
        self._in_flight[request] = None
        self._pending[request] = None
        self._pending_tokens += prompt_tokens
        self._changed(self._rank)
        return request

    def no_longer_pending(self, request: Forwarded) -> None:
        if request in self._pending:
            del self._pending[request]
            self._pending_tokens -= request.prompt_tokens
            self._changed(self._rank)

    def end(self, request: Forwarded) -> None:
        self.no_longer_pending(request)
        if request in self._in_flight:
            del self._in_flight[request]
            self._changed(self._rank)

    def is_idle_or(self, other: _RankMeter) -> bool:
        """Whether no request counted here may belong to `other` without being counted there."""
        return self is other or not self._in_flight

    def load(self, *, complete: bool) -> RankLoad | None:
        """Return the load; `complete` says that every request of this rank is counted here."""
        step = self._step
        if step is None:
            if not self._capacity.reports_steps:
                return None
            # The engine has not made a step yet: there is nothing in it but what we gave it.
            step = Step(0, 0, 0.0)
        now = self._clock()
        waiting = step.waiting + self._uncounted()
        return RankLoad(
            rank=self._rank,
            running=step.running,
            waiting=waiting,
            token_usage=step.usage,
            waiting_uncached_tokens=self._waiting_uncached(waiting) if complete else None,
            prefill_pending_tokens=self._pending_tokens if complete else None,
            active_token_usage=step.active_usage,
            gen_throughput=self._throughput(now),
            cache_hit_rate=self._hit_rate(),
            used_tokens=self._used_tokens(step.usage),
            total_tokens=self._capacity.total_tokens,
            max_running=self._capacity.max_running,
            # While the engine holds nothing, what it said last is still so.
            age_ms=_milliseconds(now - self._step_at) if self._step and self._in_flight else 0,
            engine_silence_ms=self._silence(now),
            reports_steps=self._capacity.reports_steps,
        )

    def _uncounted(self) -> int:
        """Return the sequences forwarded after the engine counted: they are in no count of its."""
        sequences = 0
        for request in reversed(self._pending):
            if request.at <= self._step_at:
                break
            sequences += request.sequences
        return sequences

    def _waiting_uncached(self, waiting: int) -> int:
        """Estimate the tokens that the waiting requests' prompts lack in the prefix cache.

        The engine starts requests in the order in which they came, so the last ones wait; what
        the cache will serve of them is taken to be what it served of those before.
        """
        tokens = 0
        for request in reversed(self._pending):
            if waiting <= 0:
                break
            waiting -= request.sequences
            tokens += request.prompt_tokens
        return math.ceil(tokens * (1.0 - (self._hit_rate() or 0.0)))

    def _throughput(self, now: float) -> float:
        self._prune(now)
        if not self._generated:
            return 0.0
        span = min(max(now - self._generated[0][0], 1.0), _WINDOW)
        return sum(tokens for _, tokens in self._generated) / span

    def _prune(self, now: float) -> None:
        while self._generated and self._generated[0][0] < now - _WINDOW:
            self._generated.popleft()

    def _add_cached(self, *counts: int) -> None:
        requests, queries, hits = counts
        self._cached.append((requests, queries, hits))
        sums = [total + count for total, count in zip(self._cache_sums, counts, strict=True)]
        while len(self._cached) > 1 and sums[0] > _HIT_RATE_REQUESTS:
            oldest = self._cached.popleft()
            sums = [total - count for total, count in zip(sums, oldest, strict=True)]
        self._cache_sums = (sums[0], sums[1], sums[2])

    def _hit_rate(self) -> float | None:
        _, queries, hits = self._cache_sums
        return hits / queries if queries else None

    def _used_tokens(self, usage: float) -> int | None:
        total, block = self._capacity.total_tokens, self._capacity.block_size
        if total is None:
            return None
        return round(usage * (total - self._capacity.reserved_tokens) / block) * block

    def _silence(self, now: float) -> int | None:
        # An engine that reports its steps is heard on each, whatever its requests are like.
        counted = (
            request.at
            for request in self._in_flight
            if request.every_step or self._capacity.reports_steps
        )
        oldest = next(counted, None)
        return None if oldest is None else _milliseconds(now - max(oldest, self._heard_at))


def _milliseconds(seconds: float) -> int:
    return max(0, round(seconds * 1000))

"""One request's life, the same on every engine: admission, its stream, and its one end.

A servicer opens a `Generation`, hands it to the engine as the sink, and reads it::

    async with generations.open(request.request_id) as generation:
        engine.submit(generation.engine_id, engine_request, generation)
        async for delta in generation:
            ...

However the block is left (the last choice finished, the client went away, a deadline, an Abort
RPC, an error), the engine is told to abort exactly once, and only if it has not finished itself.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
import uuid
from typing import TYPE_CHECKING

from smg_grpc_servicer.serving.deltas import ABORT, Delta, Finish
from smg_wire.errors import DuplicateRequest, Overloaded, SmgError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from types import TracebackType

    from typing_extensions import Self

    from smg_grpc_servicer.serving.health import Health
    from smg_wire.observability import WorkerMetrics

_logger = logging.getLogger(__name__)


class Generation:
    """A live request: the engine's sink on one side, an iterator of merged deltas on the other.

    Deltas that come while the reader is writing are merged per choice, so a slow client holds
    at most its own tokens and costs fewer messages, not more.
    """

    def __init__(self, registry: Generations, request_id: str, engine_id: str, choices: int):
        self.request_id = request_id
        self.engine_id = engine_id
        self.choices = choices
        self._registry = registry
        self._open = set(range(choices))
        self._last: dict[int, Delta] = {}
        self._pending: dict[int, Delta] = {}
        self._error: SmgError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._engine_has_it = True
        self._aborting = False
        self._ended = ""
        self._began = time.monotonic()
        self._token_times: dict[int, float] = {}

    # The engine's side.

    @property
    def aborting(self) -> bool:
        """Whether an Abort RPC has ended it and the engine's last words are still to come."""
        return self._aborting

    @property
    def over(self) -> bool:
        """Whether nothing that the engine could still bring would be taken."""
        return not self._open or self._error is not None

    def push(self, delta: Delta) -> None:
        """Take new tokens of one choice; what comes for an ended choice is dropped."""
        if delta.index not in self._open or self._error is not None:
            return
        self._observe(delta)
        if delta.finish is not None:
            self._finish_choice(delta.index, delta.finish.reason)
        self._enqueue(delta)

    def fail(self, error: SmgError) -> None:
        """End the request with an error, unless it has ended already."""
        if self._open and self._error is None:
            self._error = error
            self._engine_has_it = False
            self._registry.release(self)
            self._wake()

    # The servicer's side.

    def cut(self, error: SmgError) -> None:
        """End the request with an error while the engine still runs it, and free the engine."""
        if self._open and self._error is None:
            self._abort_engine()
            self.fail(error)

    def abort(self) -> bool:
        """End every open choice with `finish_reason: "abort"` and what it has; free the engine.

        False if the request has ended already.
        """
        if self.over or self._aborting:
            return False
        self._aborting = True
        self._ended = ABORT
        self._registry.release(self)
        self._abort_engine()
        if not self._registry.engine_speaks_last:
            self.close_aborted()
        return True

    def close_aborted(self) -> None:
        """End the choices of an aborted request that are still open."""
        if self.over or not self._aborting:
            return
        for index in sorted(self._open):
            last = self._last.get(index) or Delta(index, [], 0, 0)
            self._enqueue(
                Delta(
                    index,
                    [],
                    last.prompt_tokens,
                    last.completion_tokens,
                    last.cached_tokens,
                    finish=Finish(ABORT),
                )
            )
        self._open.clear()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        """Return what one choice has; raises the error that ended the request.

        Raises:
            SmgError: the engine refused, aborted or died; the worker drained.
        """
        while not self._pending:
            if self._error is not None:
                raise self._error
            if not self._open:
                raise StopAsyncIteration
            await self._wait()
        return self._pending.pop(next(iter(self._pending)))

    async def collect(self) -> list[Delta]:
        """Wait for the end and return one delta a choice, with all of its tokens, by index."""
        while self._open and self._error is None:
            await self._wait()
        if self._error is not None:
            raise self._error
        return [self._pending[index] for index in sorted(self._pending)]

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        del kind, traceback
        if not self._ended:
            self._ended = "cancel" if isinstance(error, asyncio.CancelledError) else "error"
        self._open.clear()
        self._abort_engine()
        self._registry.leave(self)
        self._registry.metrics.requests.labels(self._ended).inc()
        self._registry.metrics.duration.observe(time.monotonic() - self._began)

    def _finish_choice(self, index: int, reason: str) -> None:
        self._open.discard(index)
        if not self._open:
            self._engine_has_it = False
            self._ended = self._ended or reason
            self._registry.release(self)

    def _abort_engine(self) -> None:
        if self._engine_has_it:
            self._engine_has_it = False
            self._registry.abort_engine(self.engine_id)

    def _enqueue(self, delta: Delta) -> None:
        self._last[delta.index] = delta
        waiting = self._pending.get(delta.index)
        if waiting is None:
            self._pending[delta.index] = delta
        else:
            waiting.merge(delta)
            self._last[delta.index] = waiting
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def _wait(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _observe(self, delta: Delta) -> None:
        count = len(delta.token_ids)
        if not count:
            return
        metrics = self._registry.metrics
        now = time.monotonic()
        before = self._token_times.get(delta.index)
        if before is not None:
            metrics.inter_token.observe((now - before) / count)
        elif not self._token_times:
            known = delta.first_token_seconds
            metrics.time_to_first_token.observe(now - self._began if known is None else known)
            metrics.prompt_tokens.inc(delta.prompt_tokens)
            metrics.cached_tokens.inc(delta.cached_tokens)
        self._token_times[delta.index] = now
        metrics.generation_tokens.inc(count)


class Generations:
    """The live requests of one worker.

    `slots` is how many sequences the engine runs at once; up to `max_queued` more may wait.
    `abort_engine(engine_id)` must not block, and must bear an id that the engine does not know.
    An engine that speaks last holds tokens back (all of a unary answer's): when it is told to
    abort it pushes them with each choice's end, and then calls `Generation.close_aborted`.
    """

    def __init__(
        self,
        *,
        health: Health,
        metrics: WorkerMetrics,
        abort_engine: Callable[[str], None],
        slots: int,
        max_queued: int,
        engine_speaks_last: bool = False,
    ) -> None:
        self.engine_speaks_last = engine_speaks_last
        self.metrics = metrics
        self.abort_engine = abort_engine
        self._health = health
        self._slots = slots
        self._max_queued = max_queued
        # A request leaves `_live` with its last token and `_streams` with its last message: a
        # client that has read the end may use the id again, and a drain waits for the message.
        self._live: dict[str, Generation] = {}
        self._streams: set[Generation] = set()
        self._sequences = 0
        # Engine ids have one length, so that none is a prefix of another: SGLang aborts by
        # prefix. The random part keeps two workers on one engine host apart.
        self._prefix = uuid.uuid4().hex[:8]
        self._numbers = itertools.count()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def in_flight(self) -> int:
        """Requests admitted whose answer is not written to its end."""
        return len(self._streams)

    def open(self, request_id: str, *, choices: int = 1) -> Generation:
        """Admit a request; an empty id is given a name of ours.

        Raises:
            Unavailable: the worker is not serving.
            DuplicateRequest: a live request has this id.
            Overloaded: all slots are taken and the queue is full.
        """
        refusal = self._health.refusal()
        if refusal is not None:
            raise refusal
        engine_id = f"{self._prefix}-{next(self._numbers):016x}"
        request_id = request_id or engine_id
        if request_id in self._live:
            raise DuplicateRequest(request_id)
        limit = self._slots + self._max_queued
        # A request wider than everything is still served alone, not refused for ever.
        if self._sequences and self._sequences + choices > limit:
            raise Overloaded(
                f"{self._sequences} sequences are running or queued: the limit is {limit} "
                f"({self._slots} slots and --max-queued-requests {self._max_queued})"
            )
        generation = Generation(self, request_id, engine_id, choices)
        self._live[request_id] = generation
        self._streams.add(generation)
        self._sequences += choices
        self._idle.clear()
        self.metrics.in_flight.set(len(self._streams))
        # A client chose the id: quoted and cut, it cannot write lines of its own into the log.
        _logger.debug("request %.64r admitted as %s", request_id, engine_id)
        return generation

    def release(self, generation: Generation) -> None:
        """Give back the id and the slots of a request that the engine no longer runs."""
        if self._live.get(generation.request_id) is generation:
            del self._live[generation.request_id]
            self._sequences -= generation.choices

    def leave(self, generation: Generation) -> None:
        """Forget a request whose answer is written, or never will be."""
        self.release(generation)
        self._streams.discard(generation)
        if not self._streams:
            self._idle.set()
        self.metrics.in_flight.set(len(self._streams))

    def abort(self, request_ids: Iterable[str]) -> list[bool]:
        """Abort the requests that are live now; say of each id whether it was."""
        found = [self._live.get(request_id) for request_id in request_ids]
        return [generation is not None and generation.abort() for generation in found]

    def fail_all(self, error: SmgError) -> None:
        """End every request with one error: the engine no longer runs any."""
        for generation in list(self._streams):
            generation.fail(error)

    def cut_all(self, error: SmgError) -> None:
        """End every request with one error, and have the engine abort it."""
        for generation in list(self._streams):
            generation.cut(error)

    async def drained(self) -> None:
        """Wait until every answer is written."""
        await self._idle.wait()

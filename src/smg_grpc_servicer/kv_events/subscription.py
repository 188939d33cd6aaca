"""One subscriber's stream: its beginning, the batches that follow, and load records in between."""

from __future__ import annotations

import asyncio
import math
import time
from typing import TYPE_CHECKING

from smg_grpc_proto.generated import common_pb2 as pb

from smg_grpc_servicer.kv_events.records import load_record
from smg_wire.errors import OutOfRange

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Sequence

    from smg_grpc_servicer.kv_events.log import RankLog
    from smg_grpc_servicer.loads import RankLoad
    from smg_wire.errors import SmgError


class _Position:
    """Where a stream stands with one rank."""

    def __init__(self, log: RankLog, start: int) -> None:
        self.log = log
        self.next = start
        self.breaks = log.breaks
        self.begun = start != 0
        self.sent: int | None = None
        self.snapshot: Iterator[pb.KvEventBatch] | None = None
        self.record_at = 0.0
        self.core: tuple[object, ...] | None = None


class Subscription:
    """Yields what one subscriber gets; it holds a position in each rank's log and no batches.

    Args:
        logs: one a rank.
        load: returns a rank's load, or None where it is not known.
        heartbeat: seconds between load records while nothing happens.
        coalesce: seconds between load records at least.

    Raises:
        OutOfRange: the stream cannot begin at `start_sequence_number`.
        Unavailable: not yet known whether it can.
    """

    def __init__(
        self,
        request: pb.SubscribeKvEventsRequest,
        logs: Sequence[RankLog],
        load: Callable[[int], RankLoad | None],
        *,
        heartbeat: float,
        coalesce: float,
    ) -> None:
        start = request.start_sequence_number
        if start and len(logs) != 1:
            raise OutOfRange(
                f"start_sequence_number is {start}: one number is no position in the streams of "
                f"{len(logs)} ranks; subscribe from 0"
            )
        for log in logs if start else ():
            log.check_resume(start)
        self._positions = [_Position(log, start) for log in logs]
        self._records_first = request.load_records_before_first_batch
        self._load = load
        self._heartbeat = heartbeat
        self._coalesce = coalesce
        self._samples = 0
        self._error: SmgError | None = None
        self._loads_changed = False
        # A change that came too soon after a record: it is looked at when its time comes.
        self._deferred = False
        self._batches_came = False
        self._due = math.inf
        self._waiter: asyncio.Future[None] | None = None

    def batches_came(self) -> None:
        """Some log has more, or was broken."""
        self._batches_came = True
        self._wake()

    def loads_changed(self) -> None:
        """Some rank's load may be another now. Cheap when repeated."""
        if not (self._loads_changed or self._deferred):
            self._loads_changed = True
            self._wake()

    def end(self, error: SmgError) -> None:
        """End the stream with an error."""
        self._error = error
        self._wake()

    async def messages(self) -> AsyncIterator[pb.KvEventBatch]:
        """Yield batches for ever.

        Raises:
            DataLoss: batches that this subscriber has not had are gone.
            SmgError: what `end` was given.
        """
        while True:
            self._raise_ended()
            self._batches_came = False
            for position in self._positions:
                batch = self._next_batch(position)
                if batch is not None:
                    self._batches_came = True
                    yield batch
            if self._batches_came:
                continue
            self._due = math.inf
            changed = self._loads_changed or self._deferred
            self._loads_changed = self._deferred = False
            for position in self._positions:
                record = self._next_record(position, changed=changed)
                if record is not None:
                    yield record
            if not self._has_news():
                await self._wait()

    def _has_news(self) -> bool:
        """Say whether something came while the last message was written."""
        return self._batches_came or self._loads_changed or self._error is not None

    def _raise_ended(self) -> None:
        if self._error is not None:
            raise self._error

    # Batches.

    def _next_batch(self, position: _Position) -> pb.KvEventBatch | None:
        if position.snapshot is None and not position.begun:
            self._begin(position)
        if position.snapshot is not None:
            chunk = next(position.snapshot, None)
            if chunk is not None:
                return self._with_load(position, chunk)
            position.snapshot = None
        log = position.log
        broken = log.check_unbroken(position.breaks, position.next)
        if broken is not None:
            raise broken
        if position.next >= log.next:
            return None
        batch = pb.KvEventBatch()
        batch.CopyFrom(log.at(position.next))
        position.next += 1
        return self._with_load(position, batch)

    def _begin(self, position: _Position) -> None:
        """Take the state of now, if there is any: by snapshot, or by the history from batch 0.

        Until there is, whatever happens to the log has not happened to this subscriber.
        """
        log = position.log
        position.breaks = log.breaks
        position.snapshot = log.snapshot()
        position.next = 0 if position.snapshot is None else log.next
        position.begun = log.next > 0

    def _with_load(self, position: _Position, batch: pb.KvEventBatch) -> pb.KvEventBatch:
        record = self._record(position, load_only=False, telemetry=position.sent is None)
        if record is not None:
            batch.load.CopyFrom(record)
        position.sent = batch.sequence_number
        return batch

    # Load records.

    def _next_record(self, position: _Position, *, changed: bool) -> pb.KvEventBatch | None:
        if position.sent is None and not self._records_first:
            return None
        now = time.monotonic()
        earliest = position.record_at + self._coalesce
        if now < earliest:
            self._deferred = self._deferred or changed
            self._due = min(
                self._due, earliest if changed else position.record_at + self._heartbeat
            )
            return None
        latest = position.record_at + self._heartbeat
        if now < latest and not (changed and self._is_news(position)):
            self._due = min(self._due, latest)
            return None
        self._due = min(self._due, now + self._heartbeat)
        record = self._record(position, load_only=True, telemetry=True)
        if record is None:
            return None
        return pb.KvEventBatch(
            sequence_number=position.sent or 0,
            timestamp=time.time(),
            dp_rank=position.log.rank,
            load=record,
        )

    def _is_news(self, position: _Position) -> bool:
        load = self._load(position.log.rank)
        return load is not None and load.core != position.core

    def _record(
        self, position: _Position, *, load_only: bool, telemetry: bool
    ) -> pb.EngineLoad | None:
        position.record_at = time.monotonic()
        load = self._load(position.log.rank)
        if load is None:
            return None
        position.core = load.core
        self._samples += 1
        return load_record(load, sample=self._samples, load_only=load_only, telemetry=telemetry)

    # Waiting.

    async def _wait(self) -> None:
        """Wait until a batch comes, a load changes, or a record is due."""
        loop = asyncio.get_running_loop()
        self._waiter = loop.create_future()
        timer = None
        if self._due < math.inf:
            timer = loop.call_later(max(self._due - time.monotonic(), 0.0), self._wake)
        try:
            await self._waiter
        finally:
            self._waiter = None
            if timer is not None:
                timer.cancel()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

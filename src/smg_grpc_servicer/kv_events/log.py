"""What is known of one rank: its last batches, its live blocks, and where they stand."""

from __future__ import annotations

import logging
from collections import deque
from typing import TYPE_CHECKING

from smg_grpc_proto.generated import common_pb2 as pb

from smg_grpc_servicer.kv_events.convert import convert_event
from smg_grpc_servicer.kv_events.state import LiveBlocks
from smg_wire.errors import DataLoss, OutOfRange, SmgError, Unavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from smg_grpc_servicer.kv_events.frames import Batch

_logger = logging.getLogger(__name__)


class RankLog:
    """The sink of one rank's source, from which any number of subscribers read.

    A subscriber holds only a position in the history that all of them share: a slow one costs
    nothing, and finds its position gone when the history has moved on. The history holds at most
    `history_batches` batches and `history_blocks` blocks.
    """

    def __init__(
        self,
        rank: int,
        *,
        history_batches: int,
        history_blocks: int,
        live_blocks: int,
        changed: Callable[[], None],
    ) -> None:
        self.rank = rank
        self.live = LiveBlocks(live_blocks)
        # The number of the next batch, and how often the numbering or the record was broken.
        self.next = 0
        self.breaks = 0
        # Until then a position that is not held may only not be held yet.
        self.ready = False
        self._history: deque[tuple[pb.KvEventBatch, int]] = deque()
        self._history_batches = history_batches
        self._history_blocks = history_blocks
        self._held_blocks = 0
        self._event_ids = 0
        self._unknown_kinds = 0
        self._timestamp = 0.0
        self._changed = changed

    # The source's side.

    def apply(self, sequence: int, batch: Batch) -> None:
        """Take the next batch.

        Raises:
            Undecodable: an event is not what its name says; nothing is taken then.
        """
        converted = [convert_event(raw) for raw in batch.events]
        message = pb.KvEventBatch(
            sequence_number=sequence, timestamp=batch.timestamp, dp_rank=self.rank
        )
        blocks = 0
        for event in converted:
            if event is None:
                self._skip_unknown(sequence)
                continue
            self._event_ids += 1
            event.event_id = self._event_ids
            self.live.apply(event, sequence)
            blocks += len(event.stored.blocks) + len(event.removed.block_hashes)
            message.events.append(event)
        self.next = sequence + 1
        self._timestamp = batch.timestamp
        self._remember(message, blocks)
        self._changed()

    def lost(self, sequence: int) -> None:
        """Begin anew after batches that nobody will see: what they removed is not known."""
        if self.next:
            self._break()
        self.live.reset(unknown_before=sequence)
        self.next = sequence
        self._changed()

    def restarted(self) -> None:
        """Begin anew with an empty cache."""
        self._break()
        self.live.reset(unknown_before=0)
        self.next = 0
        self._changed()

    def caught_up(self) -> None:
        """Know what can be known of the time before the reading began."""
        self.ready = True
        self._changed()

    # The subscribers' side.

    @property
    def first(self) -> int:
        """The number of the oldest batch that is still held; `next` when none is."""
        return self._history[0][0].sequence_number if self._history else self.next

    def at(self, sequence: int) -> pb.KvEventBatch:
        """Return a batch between `first` and `next`; it is shared, so copy before changing it."""
        return self._history[sequence - self.first][0]

    def check_resume(self, sequence: int) -> None:
        """See whether a stream can begin with this batch.

        Raises:
            OutOfRange: the batch is no longer held, or has never been published.
            Unavailable: the publisher's past is still being read.
        """
        if not self.ready:
            raise Unavailable(f"the KV events of rank {self.rank} are still being caught up with")
        if self.first <= sequence <= self.next:
            return
        raise OutOfRange(
            f"start_sequence_number is {sequence}: batches {self.first} to {self.next - 1} are "
            "held; subscribe from 0 for the current state"
            if self.first < self.next
            else f"start_sequence_number is {sequence}: no batches are held; subscribe from 0"
        )

    def snapshot(self) -> Iterator[pb.KvEventBatch] | None:
        """Return a snapshot of now, or None if the history tells it all from the first batch."""
        if self.first == 0:
            return None
        return self.live.snapshot(self.rank, self.next - 1, self._timestamp)

    def check_unbroken(self, breaks: int, sequence: int) -> SmgError | None:
        """Return the error for a subscriber at `sequence` that counted that many breaks."""
        if breaks != self.breaks:
            return DataLoss(
                f"KV events of rank {self.rank} were lost or the engine began anew; "
                "drop its blocks and subscribe from 0"
            )
        if sequence < self.first:
            return DataLoss(
                f"this subscriber is slow: it has read up to batch {sequence - 1} of rank "
                f"{self.rank}, and the oldest that is held is {self.first}; subscribe from 0"
            )
        return None

    def _remember(self, message: pb.KvEventBatch, blocks: int) -> None:
        self._history.append((message, blocks))
        self._held_blocks += blocks
        while len(self._history) > self._history_batches or (
            self._held_blocks > self._history_blocks and len(self._history) > 1
        ):
            self._held_blocks -= self._history.popleft()[1]

    def _break(self) -> None:
        self.breaks += 1
        self._history.clear()
        self._held_blocks = 0

    def _skip_unknown(self, sequence: int) -> None:
        self._unknown_kinds += 1
        if self._unknown_kinds == 1:
            _logger.warning(
                "KV events of rank %d: batch %d has an event of a kind that is not known here; "
                "such events are left out",
                self.rank,
                sequence,
            )

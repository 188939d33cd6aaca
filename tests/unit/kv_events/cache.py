"""A subscriber that keeps the set of live blocks, as a router does, and checks what it is sent."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from smg_grpc_proto.generated import common_pb2 as pb


class Subscriber:
    def __init__(self) -> None:
        self.live: Counter[int] = Counter()
        self.parents: dict[int, int | None] = {}
        self.tokens: dict[int, list[int]] = {}
        self.cursor: int | None = None
        self.records: list[pb.EngineLoad] = []
        self.snapshots: list[pb.KvSnapshotChunk] = []

    def take(self, batch: pb.KvEventBatch) -> None:
        if batch.HasField("load"):
            if self.records:
                assert batch.load.sample > self.records[-1].sample
            self.records.append(batch.load)
            if batch.load.load_only:
                assert not batch.events
                assert batch.sequence_number == (self.cursor or 0)
                return
        if batch.HasField("snapshot"):
            chunk = batch.snapshot
            if chunk.index:
                assert batch.sequence_number == (self.cursor or 0) + 1
                assert chunk.index == self.snapshots[-1].index + 1
            else:
                assert batch.events[0].WhichOneof("data") == "cleared"
            self.snapshots.append(chunk)
        elif self.cursor is not None:
            assert batch.sequence_number == self.cursor + 1
        self.cursor = batch.sequence_number
        for event in batch.events:
            assert (event.event_id == 0) == batch.HasField("snapshot")
            self._apply(event, parents_first=batch.HasField("snapshot"))

    def _apply(self, event: pb.KvCacheEvent, *, parents_first: bool) -> None:
        kind = event.WhichOneof("data")
        if kind == "cleared":
            self.live.clear()
        elif kind == "removed":
            for block_hash in event.removed.block_hashes:
                self.live[block_hash] -= 1
            self.live = +self.live
        else:
            has_parent = event.stored.HasField("parent_block_hash")
            parent = event.stored.parent_block_hash if has_parent else None
            if parents_first:
                assert len(event.stored.blocks) == 1
            for block in event.stored.blocks:
                self.live[block.block_hash] += 1
                self.parents[block.block_hash] = parent
                self.tokens[block.block_hash] = list(block.token_ids)
                parent = block.block_hash

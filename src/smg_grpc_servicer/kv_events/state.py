"""The blocks that live in one rank's cache, as its events told, and a snapshot of them."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

from smg_grpc_proto.generated import common_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Iterator

# A chunk of this many blocks is some 100 KB: far below any limit on a message.
_BLOCKS_PER_CHUNK = 512


class _Key(NamedTuple):
    """What tells one entry of a cache from another; removals name all of it."""

    block_hash: int
    group: int | None
    medium: str | None
    ownership: str | None


class _Entry:
    """One block, and how many physical copies of it there are."""

    __slots__ = ("copies", "parent", "salt", "sequence", "stored")

    def __init__(self, stored: pb.KvBlocksStored, sequence: int) -> None:
        self.parent = stored.parent_block_hash if stored.HasField("parent_block_hash") else None
        self.salt = stored.cache_salt or None
        # Packed: a message of one block costs ten times its bytes, and there are many.
        self.stored = stored.SerializeToString()
        self.sequence = sequence
        self.copies = 1


class LiveBlocks:
    """What is in the cache now.

    At most `limit` distinct blocks are recorded. Beyond that the oldest are forgotten, and
    `unknown_before` says so: the batches before that sequence may have stored what is not here.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._entries: dict[_Key, _Entry] = {}
        self._by_hash: defaultdict[int, list[_Key]] = defaultdict(list)
        self.unknown_before = 0

    @property
    def copies(self) -> int:
        """Live blocks, physical copies counted."""
        return sum(entry.copies for entry in self._entries.values())

    def reset(self, unknown_before: int) -> None:
        """Begin anew: nothing is known of what the batches before that sequence stored."""
        self._entries.clear()
        self._by_hash.clear()
        self.unknown_before = unknown_before

    def apply(self, event: pb.KvCacheEvent, sequence: int) -> None:
        """Take in one event of the batch with that sequence.

        A stored event whose parent lives under a cache salt is given that salt: the engine
        names it on a prompt's first block alone.
        """
        kind = event.WhichOneof("data")
        if kind == "stored":
            self._store(event.stored, sequence)
        elif kind == "removed":
            self._remove(event.removed)
        elif event.cleared.ownership:
            for key in [key for key in self._entries if key.ownership == event.cleared.ownership]:
                self._forget(key)
        else:
            # All is gone, and so is whatever was not known.
            self.reset(unknown_before=0)

    def snapshot(self, rank: int, sequence: int, timestamp: float) -> Iterator[pb.KvEventBatch]:
        """Return the chunks of a snapshot taken now, after the batch with that sequence.

        The state is fixed by this call; the chunks are built one at a time as they are asked for.
        """
        entries = [(entry.stored, entry.copies) for entry in self._in_order()]
        blocks = sum(copies for _, copies in entries)
        # The chunks' numbers end at `sequence` and stay above 0, which stands for "no number".
        count = max(1, min(math.ceil(blocks / _BLOCKS_PER_CHUNK), sequence))
        chunk = pb.KvSnapshotChunk(count=count, blocks=blocks, unknown_before=self.unknown_before)
        return _chunks(entries, rank, sequence, timestamp, chunk)

    def _store(self, stored: pb.KvBlocksStored, sequence: int) -> None:
        parent = stored.parent_block_hash if stored.HasField("parent_block_hash") else None
        if parent is not None and not stored.cache_salt:
            salt = self._salt_of(parent)
            if salt is not None:
                stored.cache_salt = salt
        single = pb.KvBlocksStored()
        single.CopyFrom(stored)
        for block in stored.blocks:
            del single.blocks[:]
            single.blocks.append(block)
            if parent is None:
                single.ClearField("parent_block_hash")
            else:
                single.parent_block_hash = parent
            self._add(single, block.block_hash, sequence)
            parent = block.block_hash

    def _add(self, stored: pb.KvBlocksStored, block_hash: int, sequence: int) -> None:
        key = _key(block_hash, stored)
        entry = self._entries.get(key)
        if entry is not None:
            entry.copies += 1
            return
        if len(self._entries) >= self._limit:
            self._forget_oldest()
        self._entries[key] = _Entry(stored, sequence)
        self._by_hash[block_hash].append(key)

    def _remove(self, removed: pb.KvBlocksRemoved) -> None:
        for block_hash in removed.block_hashes:
            key = _key(block_hash, removed)
            entry = self._entries.get(key)
            if entry is None:
                continue
            entry.copies -= 1
            if not entry.copies:
                self._forget(key)

    def _forget_oldest(self) -> None:
        key = next(iter(self._entries))
        self.unknown_before = max(self.unknown_before, self._entries[key].sequence + 1)
        self._forget(key)

    def _forget(self, key: _Key) -> None:
        del self._entries[key]
        keys = self._by_hash[key.block_hash]
        keys.remove(key)
        if not keys:
            del self._by_hash[key.block_hash]

    def _salt_of(self, block_hash: int) -> str | None:
        keys = self._by_hash.get(block_hash)
        return self._entries[keys[0]].salt if keys else None

    def _in_order(self) -> list[_Entry]:
        """Return the entries, parents before their children.

        Mostly that is the order of storing; a parent evicted and stored again is younger than
        its children.
        """
        ordered: dict[_Key, _Entry] = {}
        entered: set[_Key] = set()
        for key in self._entries:
            path = [key]
            while path:
                # Each turn enters a parent or leaves a key; a key is entered once, so that not
                # even a circle of hashes turns this for ever.
                entry = self._entries[path[-1]]
                entered.add(path[-1])
                parent = next((key for key in self._parents(entry) if key not in entered), None)
                if parent is not None:
                    path.append(parent)
                else:
                    ordered[path.pop()] = entry
        return list(ordered.values())

    def _parents(self, entry: _Entry) -> list[_Key]:
        return [] if entry.parent is None else self._by_hash.get(entry.parent, [])


def _key(block_hash: int, event: pb.KvBlocksStored | pb.KvBlocksRemoved) -> _Key:
    return _Key(
        block_hash,
        event.group_idx if event.HasField("group_idx") else None,
        event.medium if event.HasField("medium") else None,
        event.ownership if event.HasField("ownership") else None,
    )


def _chunks(
    entries: list[tuple[bytes, int]],
    rank: int,
    sequence: int,
    timestamp: float,
    chunk: pb.KvSnapshotChunk,
) -> Iterator[pb.KvEventBatch]:
    physical = (stored for stored, copies in entries for _ in range(copies))
    per_chunk = math.ceil(chunk.blocks / chunk.count)
    for index in range(chunk.count):
        batch = pb.KvEventBatch(
            sequence_number=sequence - (chunk.count - 1 - index),
            timestamp=timestamp,
            dp_rank=rank,
            snapshot=chunk,
        )
        batch.snapshot.index = index
        if index == 0:
            batch.events.add().cleared.SetInParent()
        for stored in itertools.islice(physical, per_chunk):
            batch.events.add().stored.MergeFromString(stored)
        yield batch

"""The record of live blocks, and its snapshots."""

from __future__ import annotations

from typing import Any

import pytest
from smg_grpc_proto.generated import common_pb2 as pb
from tests.unit.kv_events.cache import Subscriber
from tests.unit.kv_events.publisher import CLEARED, removed, stored

from smg_grpc_servicer.kv_events.convert import convert_event
from smg_grpc_servicer.kv_events.state import LiveBlocks


def told(*events: Any, limit: int = 1000) -> LiveBlocks:
    """A record to which each event came in a batch of its own."""
    live = LiveBlocks(limit)
    for sequence, raw in enumerate(events):
        event = convert_event(raw)
        assert event is not None
        live.apply(event, sequence)
    return live


def joined(live: LiveBlocks, sequence: int = 99) -> Subscriber:
    subscriber = Subscriber()
    for chunk in live.snapshot(0, sequence, 1.0):
        subscriber.take(chunk)
    return subscriber


def order(live: LiveBlocks) -> list[int]:
    return [
        event.stored.blocks[0].block_hash
        for chunk in live.snapshot(0, 99, 1.0)
        for event in chunk.events
        if event.WhichOneof("data") == "stored"
    ]


def test_a_block_lives_until_its_last_copy_is_removed() -> None:
    twice = [stored([1], [5, 6]), stored([1], [5, 6])]
    assert joined(told(*twice)).live == {1: 2}
    assert joined(told(*twice, removed(1))).live == {1: 1}
    assert not joined(told(*twice, removed(1), removed(1))).live
    assert not joined(told(*twice, removed(1), removed(1), removed(1))).live


def test_a_removal_takes_the_copy_of_its_own_tier() -> None:
    live = told(stored([1], [5, 6]), stored([1], [5, 6], medium="CPU"), removed(1, medium="CPU"))
    assert live.copies == 1
    [chunk] = live.snapshot(0, 5, 1.0)
    assert chunk.events[1].stored.medium == "GPU"


def test_a_snapshot_of_nothing_is_one_chunk_that_clears() -> None:
    [chunk] = told(stored([1], [1, 2]), CLEARED).snapshot(3, 1, 1.0)
    assert [event.WhichOneof("data") for event in chunk.events] == ["cleared"]
    assert (chunk.sequence_number, chunk.dp_rank) == (1, 3)
    assert chunk.snapshot == pb.KvSnapshotChunk(index=0, count=1)


def test_parents_come_before_children_even_when_they_were_stored_again_later() -> None:
    chain = [stored([n], [1, 2], parent=n - 1 if n > 1 else None) for n in range(1, 6)]
    live = told(*chain, removed(1, 2, 3), chain[2], chain[1], chain[0])
    assert order(live) == [1, 2, 3, 4, 5]


def test_a_long_chain_stored_backwards_is_put_in_order() -> None:
    chain = [stored([n], [1, 2], parent=n - 1) for n in range(1, 5001)]
    assert order(told(*reversed(chain), limit=10_000)) == list(range(1, 5001))


def test_a_circle_of_hashes_ends() -> None:
    circle = told(stored([1], [1, 2], parent=2), stored([2], [1, 2], parent=1))
    assert sorted(order(circle)) == [1, 2]


def test_a_snapshot_keeps_the_fields_of_the_original_store() -> None:
    raw = {
        "type": "BlockStored",
        "block_hashes": [1, 2],
        "parent_block_hash": None,
        "token_ids": [1, 2, 3, 4],
        "block_size": 2,
        "lora_id": 4,
        "medium": "GPU",
        "lora_name": "adapter",
        "extra_keys": [["adapter", "salt"], ["adapter"]],
        "group_idx": 2,
        "kv_cache_spec_kind": "full_attention",
        "session_id": "s",
    }
    live = told(raw)
    original = convert_event(raw)
    assert original is not None
    [chunk] = live.snapshot(0, 9, 1.0)
    _, first, second = (event.stored for event in chunk.events)
    assert [first.blocks[0], second.blocks[0]] == list(original.stored.blocks)
    assert second.parent_block_hash == 1
    for single in (first, second):
        single.ClearField("parent_block_hash")
        del single.blocks[:]
    del original.stored.blocks[:]
    assert first == second == original.stored


def test_what_is_stored_under_a_salt_passes_it_on_to_its_children() -> None:
    root = {
        **dict.fromkeys(("parent_block_hash", "lora_id", "medium", "lora_name")),
        "type": "BlockStored",
        "block_hashes": [1],
        "token_ids": [1, 2],
        "block_size": 2,
        "extra_keys": [["salt"]],
    }
    live = told(root)
    for parent, salt in ((1, "salt"), (2, "salt"), (77, "")):
        child = convert_event(stored([parent + 1], [1, 2], parent=parent, medium=None))
        assert child is not None
        live.apply(child, 1)
        assert child.stored.cache_salt == salt


def test_beyond_the_limit_the_oldest_are_forgotten_and_the_snapshot_says_so() -> None:
    live = told(*(stored([n], [1, 2]) for n in range(10)), limit=4)
    subscriber = joined(live)
    assert set(subscriber.live) == {6, 7, 8, 9}
    assert [chunk.unknown_before for chunk in subscriber.snapshots] == [6]


def test_a_cleared_cache_is_known_whole_again() -> None:
    live = LiveBlocks(10)
    live.reset(unknown_before=7)
    assert joined(live).snapshots[0].unknown_before == 7
    cleared = convert_event(CLEARED)
    assert cleared is not None
    live.apply(cleared, 7)
    assert joined(live).snapshots[0].unknown_before == 0


def test_clearing_one_owners_blocks_leaves_the_others() -> None:
    pool = {"type": "BlockStored", "block_hashes": [2], "token_ids": [1, 2], "block_size": 2}
    live = told(
        stored([1], [1, 2], medium=None),
        {**pool, "ownership": "pool"},
        {"type": "AllBlocksCleared", "ownership": "pool"},
    )
    assert set(joined(live).live) == {1}


@pytest.mark.parametrize("sequence", [1, 2, 3, 1000])
def test_chunks_never_count_below_the_publishers_numbers(sequence: int) -> None:
    live = told(*(stored([n], [1, 2]) for n in range(2000)), limit=5000)
    chunks = list(live.snapshot(0, sequence, 1.0))
    assert [chunk.sequence_number for chunk in chunks] == list(
        range(sequence - len(chunks) + 1, sequence + 1)
    )
    assert chunks[0].sequence_number >= 1
    assert {chunk.snapshot.blocks for chunk in chunks} == {2000}
    assert sum(len(chunk.events) for chunk in chunks) == 2001


def test_a_snapshot_is_of_the_moment_it_was_taken() -> None:
    live = told(*(stored([n], [1, 2]) for n in range(3)))
    snapshot = live.snapshot(0, 2, 1.0)
    event = convert_event(CLEARED)
    assert event is not None
    live.apply(event, 3)
    assert sum(len(chunk.events) for chunk in snapshot) == 4

"""The relay against a real publisher: sockets, a thread, and what goes wrong between them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec
import pytest
from smg_grpc_proto.generated import common_pb2 as pb
from tests.unit.kv_events.conftest import descriptors, until
from tests.unit.kv_events.publisher import CLEARED, Publisher, removed, stored

from smg_grpc_servicer.kv_events import Endpoint, KvEventRelay, RelayLimits
from smg_grpc_servicer.loads import Capacity, LoadBoard
from smg_wire.errors import DataLoss, OutOfRange, Unavailable

if TYPE_CHECKING:
    from pathlib import Path

    from tests.unit.kv_events.conftest import RelayBench


async def test_batches_reach_a_subscriber_with_the_publishers_numbers(
    bench: RelayBench, tmp_path: Path
) -> None:
    with Publisher(tmp_path) as publisher:
        stream = bench.stream(bench.relay([publisher]))
        publisher.publish(stored([1, 2], [10, 11, 12, 13]))
        publisher.publish(removed(2))
        subscriber = await stream.reached(1)
    assert subscriber.live == {1: 1}
    assert subscriber.tokens == {1: [10, 11], 2: [12, 13]}
    assert subscriber.parents == {1: None, 2: 1}
    assert [batch.sequence_number for batch in stream.events] == [0, 1]
    assert [batch.dp_rank for batch in stream.events] == [0, 0]
    assert [event.event_id for batch in stream.events for event in batch.events] == [1, 2]


@pytest.mark.parametrize("topic", [True, False])
async def test_what_was_published_before_the_relay_began_is_replayed(
    bench: RelayBench, tmp_path: Path, topic: bool
) -> None:
    with Publisher(tmp_path, topic_in_replay=topic) as publisher:
        for number in range(5):
            publisher.publish(stored([number], [1, 2]))
        stream = bench.stream(bench.relay([publisher.drained()]))
        subscriber = await stream.reached(4)
    assert set(subscriber.live) == set(range(5))
    assert not subscriber.snapshots


async def test_a_gap_is_filled_from_the_replay_socket_before_what_follows_it(
    bench: RelayBench, tmp_path: Path
) -> None:
    with Publisher(tmp_path) as publisher:
        stream = bench.stream(bench.relay([publisher], probe_every=60.0))
        publisher.publish(stored([0], [1, 2]))
        await stream.reached(0)
        asked = publisher.replays
        publisher.publish(stored([1], [1, 2]), drop=True)
        publisher.publish(stored([2], [1, 2]), drop=True)
        publisher.publish(removed(1))
        subscriber = await stream.reached(3)
        assert publisher.replays > asked
    assert set(subscriber.live) == {0, 2}


async def test_live_batches_that_come_during_a_replay_are_applied_after_it_and_once(
    bench: RelayBench, tmp_path: Path
) -> None:
    with Publisher(tmp_path, answer_after=0.2) as publisher:
        stream = bench.stream(bench.relay([publisher], probe_every=60.0))
        publisher.publish(stored([0], [1, 2]))
        await stream.reached(0)
        publisher.publish(stored([1], [1, 2]), drop=True)
        for number in range(2, 12):
            publisher.publish(stored([number], [1, 2]))
            await asyncio.sleep(0.02)
        subscriber = await stream.reached(11)
    # `Subscriber` checks the order; a copy too many would show here.
    assert subscriber.live == dict.fromkeys(range(12), 1)


async def test_the_last_batch_before_a_silence_is_missed_for_no_longer_than_a_probe(
    bench: RelayBench, tmp_path: Path
) -> None:
    with Publisher(tmp_path) as publisher:
        stream = bench.stream(bench.relay([publisher]))
        publisher.publish(stored([0], [1, 2]))
        await stream.reached(0)
        publisher.publish(stored([1], [1, 2]), drop=True)
        await stream.reached(1)


async def test_a_gap_that_cannot_be_filled_ends_the_stream_and_the_next_says_what_is_unknown(
    bench: RelayBench, tmp_path: Path
) -> None:
    with Publisher(tmp_path) as publisher:
        relay = bench.relay([publisher], probe_every=60.0)
        stream = bench.stream(relay)
        publisher.publish(stored([0], [1, 2]))
        await stream.reached(0)
        publisher.publish(removed(0), drop=True, keep=False)
        publisher.publish(stored([2], [1, 2]))
        with pytest.raises(DataLoss):
            await stream.task
        # What was known before the gap may have been removed in it.
        again = bench.stream(relay)
        subscriber = await again.reached(2)
    assert set(subscriber.live) == {2}
    assert [(chunk.unknown_before, chunk.blocks) for chunk in subscriber.snapshots] == [(2, 1)]


async def test_a_publisher_without_replay_that_was_joined_late_is_known_in_part(
    bench: RelayBench, tmp_path: Path
) -> None:
    with Publisher(tmp_path) as publisher:
        for number in range(3):
            publisher.publish(stored([number], [1, 2]))
        relay = bench.relay([publisher.drained()], replay=False)
        stream = bench.stream(relay)
        # The subscription has to arrive at the publisher before anything comes.
        while stream.subscriber.cursor is None:
            last = publisher.publish(stored([3], [1, 2]))
            await asyncio.sleep(0.05)
        subscriber = await stream.reached(last)
    assert subscriber.snapshots[0].unknown_before >= 3
    assert set(subscriber.live) == {3}


async def test_an_undecodable_batch_is_a_loss(bench: RelayBench, tmp_path: Path) -> None:
    with Publisher(tmp_path) as publisher:
        relay = bench.relay([publisher])
        stream = bench.stream(relay)
        publisher.publish(stored([0], [1, 2]))
        await stream.reached(0)
        publisher.publish_raw(b"\xc1 no msgpack")
        with pytest.raises(DataLoss):
            await stream.task
        publisher.publish(stored([2], [1, 2]))
        again = bench.stream(relay)
        assert set((await again.reached(2)).live) == {2}


async def test_an_event_of_a_kind_to_come_is_left_out_and_the_rest_is_relayed(
    bench: RelayBench, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Publisher(tmp_path) as publisher:
        stream = bench.stream(bench.relay([publisher]))
        publisher.publish(["BlockPolished", 1], stored([0], [1, 2]))
        publisher.publish(["BlockPolished", 1])
        subscriber = await stream.reached(1)
    assert set(subscriber.live) == {0}
    assert caplog.text.count("not known here") == 1


@pytest.mark.parametrize("batches_of_the_new_one", [1, 9])
async def test_a_publisher_that_began_anew_ends_the_stream_and_its_cache_alone_is_told(
    bench: RelayBench, tmp_path: Path, batches_of_the_new_one: int
) -> None:
    with Publisher(tmp_path) as publisher:
        relay = bench.relay([publisher])
        stream = bench.stream(relay)
        for number in range(3):
            publisher.publish(stored([number], [1, 2]))
        await stream.reached(2)
    with Publisher(tmp_path) as publisher:
        for number in range(batches_of_the_new_one):
            publisher.publish(stored([100 + number], [1, 2]))
        with pytest.raises(DataLoss):
            await asyncio.wait_for(asyncio.shield(stream.task), 5)
        again = bench.stream(relay)
        subscriber = await again.reached(batches_of_the_new_one - 1)
    assert set(subscriber.live) == {100 + number for number in range(batches_of_the_new_one)}


async def test_a_late_joiner_gets_a_snapshot_and_then_what_follows(
    bench: RelayBench, tmp_path: Path
) -> None:
    with Publisher(tmp_path) as publisher:
        relay = bench.relay([publisher], history_batches=3)
        first = bench.stream(relay)
        publisher.publish(stored([1], [1, 2]), stored([2], [3, 4], parent=1))
        for number in range(3, 9):
            publisher.publish(stored([number], [5, 6]))
        publisher.publish(removed(3))
        await first.reached(7)
        joined = bench.stream(relay)
        subscriber = await joined.reached(7)
        assert subscriber.live == first.subscriber.live
        assert [chunk.blocks for chunk in subscriber.snapshots] == [7]
        assert [chunk.unknown_before for chunk in subscriber.snapshots] == [0]
        publisher.publish(removed(1, 2))
        assert set((await joined.reached(8)).live) == {4, 5, 6, 7, 8}


async def test_a_large_snapshot_comes_in_chunks_whose_numbers_end_where_live_batches_go_on(
    bench: RelayBench, tmp_path: Path
) -> None:
    with Publisher(tmp_path) as publisher:
        relay = bench.relay([publisher], history_batches=1)
        first = bench.stream(relay)
        for number in range(20):
            hashes = list(range(number * 100, number * 100 + 100))
            publisher.publish(stored(hashes, [7] * 200))
            await first.reached(number)
        joined = bench.stream(relay)
        subscriber = await joined.reached(19)
        assert [chunk.index for chunk in subscriber.snapshots] == [0, 1, 2, 3]
        assert {chunk.count for chunk in subscriber.snapshots} == {4}
        assert [batch.sequence_number for batch in joined.events] == [16, 17, 18, 19]
        assert len(subscriber.live) == 2000
        publisher.publish(CLEARED)
        assert not (await joined.reached(20)).live


async def test_a_slow_subscriber_is_cut_and_holds_up_nobody(
    bench: RelayBench, tmp_path: Path
) -> None:
    with Publisher(tmp_path) as publisher:
        relay = bench.relay([publisher], history_batches=8)
        quick = bench.stream(relay)
        slow = relay.subscribe(pb.SubscribeKvEventsRequest())
        publisher.publish(stored([0], [1, 2]))
        assert (await anext(slow)).sequence_number == 0
        for number in range(1, 50):
            publisher.publish(stored([number], [1, 2]))
            await asyncio.sleep(0)
        assert len((await quick.reached(49)).live) == 50
        with pytest.raises(DataLoss, match="slow"):
            await anext(slow)
        # From 0 it finds the state of now.
        assert len((await bench.stream(relay).reached(49)).live) == 50


async def test_a_stream_resumes_at_a_batch_that_is_held(bench: RelayBench, tmp_path: Path) -> None:
    with Publisher(tmp_path) as publisher:
        relay = bench.relay([publisher], history_batches=5)
        first = bench.stream(relay)
        for number in range(10):
            publisher.publish(stored([number], [1, 2]))
        await first.reached(9)
        resumed = bench.stream(relay, 7)
        assert set((await resumed.reached(9)).live) == {7, 8, 9}
        up_to_date = bench.stream(relay, 10)
        publisher.publish(stored([10], [1, 2]))
        assert set((await up_to_date.reached(10)).live) == {10}


@pytest.mark.parametrize("start", [4, 11, 2**63])
async def test_a_position_that_is_not_held_is_out_of_range(
    bench: RelayBench, tmp_path: Path, start: int
) -> None:
    with Publisher(tmp_path) as publisher:
        relay = bench.relay([publisher], history_batches=5)
        first = bench.stream(relay)
        for number in range(10):
            publisher.publish(stored([number], [1, 2]))
        await first.reached(9)
        with pytest.raises(OutOfRange, match=f"start_sequence_number is {start}"):
            await bench.stream(relay, start).task


async def test_a_position_asked_for_while_the_past_is_read_is_refused_for_now(
    bench: RelayBench, tmp_path: Path
) -> None:
    with Publisher(tmp_path, answer_after=0.3) as publisher:
        for number in range(10):
            publisher.publish(stored([number], [1, 2]))
        relay = bench.relay([publisher])
        with pytest.raises(Unavailable):
            await bench.stream(relay, 5).task
        await bench.stream(relay).reached(9)
        await bench.stream(relay, 5).reached(9)


async def test_all_ranks_come_on_one_stream_each_with_its_own_numbers(
    bench: RelayBench, tmp_path: Path
) -> None:
    bench.loads = LoadBoard({0: Capacity(reports_steps=True), 1: Capacity(reports_steps=True)})
    (tmp_path / "0").mkdir()
    (tmp_path / "1").mkdir()
    with Publisher(tmp_path / "0") as zero, Publisher(tmp_path / "1") as one:
        relay = bench.relay([zero, one])
        messages = relay.subscribe(pb.SubscribeKvEventsRequest())
        for number in range(3):
            zero.publish(stored([number], [1, 2]))
        one.publish(stored([9], [1, 2]))
        seen = []
        while len(seen) < 4:
            batch = await anext(messages)
            if not batch.load.load_only:
                seen.append((batch.dp_rank, batch.sequence_number))
        assert sorted(seen) == [(0, 0), (0, 1), (0, 2), (1, 0)]
        with pytest.raises(OutOfRange, match="2 ranks"):
            await bench.stream(relay, 1).task
        await messages.aclose()  # type: ignore[attr-defined]


async def test_many_subscribers_see_the_same(bench: RelayBench, tmp_path: Path) -> None:
    with Publisher(tmp_path) as publisher:
        relay = bench.relay([publisher])
        streams = [bench.stream(relay) for _ in range(50)]
        for number in range(20):
            publisher.publish(stored([number], [1, 2]))
        for stream in streams:
            assert len((await stream.reached(19)).live) == 20


async def test_subscribers_that_leave_and_a_relay_that_closes_leave_nothing_behind(
    tmp_path: Path,
) -> None:
    with Publisher(tmp_path) as publisher:

        async def live_once() -> None:
            endpoint = Endpoint(0, publisher.events, publisher.replay)
            relay = KvEventRelay([endpoint], LoadBoard({0: Capacity()}))
            relay.start()
            messages = relay.subscribe(pb.SubscribeKvEventsRequest())
            await anext(messages)
            waiting = asyncio.create_task(_exhaust(messages))
            await asyncio.sleep(0.01)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            await relay.close()
            await relay.close()

        publisher.publish(stored([0], [1, 2]))
        await live_once()
        tasks, open_files = len(asyncio.all_tasks()), descriptors()
        for _ in range(5):
            await live_once()
        assert len(asyncio.all_tasks()) == tasks
        await until(lambda: descriptors() <= open_files)


async def test_a_relay_closes_whatever_its_readers_are_just_doing(tmp_path: Path) -> None:
    with Publisher(tmp_path) as publisher:
        publisher.publish(stored([0], [1, 2]))
        for turn in range(100):
            endpoint = Endpoint(0, publisher.events, publisher.replay)
            limits = RelayLimits(probe_every=0.001)
            relay = KvEventRelay([endpoint], LoadBoard({0: Capacity()}), limits)
            relay.start()
            await asyncio.sleep(turn / 5000)
            await asyncio.wait_for(relay.close(), 10)


async def test_a_relay_that_closes_ends_its_streams_and_refuses_new_ones(
    bench: RelayBench, tmp_path: Path
) -> None:
    with Publisher(tmp_path) as publisher:
        relay = bench.relay([publisher])
        stream = bench.stream(relay)
        publisher.publish(stored([0], [1, 2]))
        await stream.reached(0)
        await relay.close()
        with pytest.raises(Unavailable):
            await stream.task
        with pytest.raises(Unavailable):
            await bench.stream(relay).task


async def test_a_relay_that_has_not_been_started_is_unavailable(tmp_path: Path) -> None:
    relay = KvEventRelay([Endpoint(0, f"ipc://{tmp_path}/x")], LoadBoard({0: Capacity()}))
    with pytest.raises(Unavailable):
        await anext(relay.subscribe(pb.SubscribeKvEventsRequest()))


async def test_a_publisher_that_connects_finds_the_relay_bound(tmp_path: Path) -> None:
    import zmq

    address = f"ipc://{tmp_path}/bound"
    relay = KvEventRelay([Endpoint(0, address, bind=True)], LoadBoard({0: Capacity()}))
    relay.start()
    context = zmq.Context()
    publisher = context.socket(zmq.PUB)
    publisher.connect(address)
    try:
        messages = relay.subscribe(pb.SubscribeKvEventsRequest())
        first = asyncio.ensure_future(anext(messages))
        while not first.done():
            payload = msgspec.msgpack.encode([1.0, [stored([5], [1, 2])], 0])
            publisher.send_multipart([b"", (0).to_bytes(8, "big"), payload])
            await asyncio.sleep(0.02)
        assert (await first).events[0].stored.blocks[0].block_hash == 5
        await messages.aclose()  # type: ignore[attr-defined]
    finally:
        publisher.close(linger=0)
        context.term()
        await relay.close()


async def test_an_address_that_another_process_has_ends_streams_as_unavailable(
    bench: RelayBench, tmp_path: Path
) -> None:
    endpoint = Endpoint(0, "tcp://no.such.interface:1", bind=True)
    relay = KvEventRelay([endpoint], bench.loads)
    relay.start()
    try:
        with pytest.raises(Unavailable, match="cannot be read"):
            await bench.stream(relay).task
    finally:
        await relay.close()


async def _exhaust(messages: object) -> None:
    async for _ in messages:  # type: ignore[attr-defined]
        pass

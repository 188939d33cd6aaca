"""Load records on a stream: with each batch, between them, and before the first."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import pytest
from tests.unit.kv_events.conftest import until
from tests.unit.kv_events.publisher import Publisher, stored

from smg_grpc_servicer.loads import Capacity, LoadBoard, Step

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.unit.kv_events.conftest import RelayBench, Stream

CAPACITY = Capacity(max_running=8, total_tokens=640, block_size=32, reports_steps=True)


@pytest.fixture
def publisher(tmp_path: Path) -> Iterator[Publisher]:
    with Publisher(tmp_path) as publisher:
        yield publisher


@pytest.fixture
def loads(bench: RelayBench) -> LoadBoard:
    bench.loads = LoadBoard({0: CAPACITY})
    return bench.loads


async def count(stream: Stream, records: int) -> None:
    await until(lambda: len(stream.subscriber.records) >= records or stream.task.done())
    assert not stream.task.done()


async def test_every_batch_carries_the_load_and_the_first_one_the_rest(
    bench: RelayBench, publisher: Publisher, loads: LoadBoard
) -> None:
    loads.observe(0, Step(2, 1, 0.5, active_usage=0.5, cache_requests=1, cache_queries=4))
    stream = bench.stream(bench.relay([publisher], heartbeat=60.0))
    publisher.publish(stored([1], [1, 2]))
    publisher.publish(stored([2], [1, 2]))
    await stream.reached(1)
    first, second = (batch.load for batch in stream.batches)
    for record in (first, second):
        assert (record.running_requests, record.waiting_requests) == (2, 1)
        assert (record.token_usage, record.active_token_usage) == (0.5, 0.5)
        assert record.max_running_requests == 8
        assert not record.load_only
        assert record.engine_reports_steps
        assert (record.waiting_uncached_tokens, record.prefill_pending_tokens) == (0, 0)
        assert record.HasField("waiting_uncached_tokens")
        assert not record.HasField("engine_silence_ms")
    assert (first.num_used_tokens, first.max_total_num_tokens, first.cache_hit_rate) == (
        320,
        640,
        0,
    )
    assert first.HasField("cache_hit_rate")
    telemetry = ("cache_hit_rate", "num_used_tokens", "max_total_num_tokens")
    assert [name for name in telemetry if second.HasField(name)] == []
    assert [first.sample, second.sample] == [1, 2]


async def test_a_change_without_an_event_is_told_between_batches_and_changes_are_merged(
    bench: RelayBench, publisher: Publisher, loads: LoadBoard
) -> None:
    stream = bench.stream(bench.relay([publisher], heartbeat=60.0, coalesce=0.1))
    publisher.publish(stored([1], [1, 2]))
    await stream.reached(0)
    for running in range(1, 30):
        loads.observe(0, Step(running, 0, 0.0))
        await asyncio.sleep(0.001)
    await until(lambda: stream.subscriber.records[-1].running_requests == 29)
    # `Subscriber` checks that they repeat the last number and carry no events.
    assert 2 <= len(stream.subscriber.records) <= 5
    assert stream.batches[-1].load.load_only
    assert stream.batches[-1].load.HasField("max_total_num_tokens")
    records = len(stream.subscriber.records)
    loads.observe(0, Step(29, 0, 0.0))
    await asyncio.sleep(0.3)
    assert len(stream.subscriber.records) == records


async def test_an_idle_stream_has_a_heartbeat(
    bench: RelayBench, publisher: Publisher, loads: LoadBoard
) -> None:
    del loads
    stream = bench.stream(bench.relay([publisher], heartbeat=0.05, coalesce=0.01))
    publisher.publish(stored([1], [1, 2]))
    await stream.reached(0)
    began = time.monotonic()
    await count(stream, 6)
    assert time.monotonic() - began >= 0.2
    assert all(batch.load.load_only for batch in stream.batches[1:])


async def test_records_before_the_first_batch_come_numbered_0_to_who_takes_them(
    bench: RelayBench, publisher: Publisher, loads: LoadBoard
) -> None:
    relay = bench.relay([publisher], heartbeat=0.05, coalesce=0.01)
    taker = bench.stream(relay, records_first=True)
    other = bench.stream(relay)
    await count(taker, 2)
    loads.forwarded(33)
    await until(lambda: taker.subscriber.records[-1].prefill_pending_tokens == 33)
    assert taker.subscriber.records[-1].HasField("engine_silence_ms")
    assert {batch.sequence_number for batch in taker.batches} == {0}
    assert not other.batches
    publisher.publish(stored([1], [1, 2]))
    assert (await taker.reached(0)).live == (await other.reached(0)).live == {1: 1}


async def test_a_silent_engine_is_told_by_the_heartbeat(
    bench: RelayBench, publisher: Publisher, loads: LoadBoard
) -> None:
    loads.observe(0, Step(0, 0, 0.0))
    stream = bench.stream(
        bench.relay([publisher], heartbeat=0.05, coalesce=0.01), records_first=True
    )
    forwarded = loads.forwarded(10)
    await until(lambda: stream.subscriber.records[-1:] != [])
    await until(lambda: stream.subscriber.records[-1].engine_silence_ms >= 150)
    forwarded.ended()
    await until(lambda: not stream.subscriber.records[-1].HasField("engine_silence_ms"))


async def test_without_statistics_batches_come_without_records(
    bench: RelayBench, publisher: Publisher
) -> None:
    bench.loads = LoadBoard({0: Capacity()})
    stream = bench.stream(
        bench.relay([publisher], heartbeat=0.02, coalesce=0.01), records_first=True
    )
    publisher.publish(stored([1], [1, 2]))
    await stream.reached(0)
    await asyncio.sleep(0.1)
    assert [batch.HasField("load") for batch in stream.batches] == [False]


async def test_a_snapshot_carries_the_load_as_well(
    bench: RelayBench, publisher: Publisher, loads: LoadBoard
) -> None:
    relay = bench.relay([publisher], history_batches=1, heartbeat=60.0)
    first = bench.stream(relay)
    for number in range(3):
        publisher.publish(stored([number], [1, 2]))
        await first.reached(number)
    loads.observe(0, Step(7, 0, 0.0))
    stream = bench.stream(relay)
    await stream.reached(2)
    assert stream.batches[0].HasField("snapshot")
    assert stream.batches[0].load.running_requests == 7

"""KV events of the real engine: what a subscriber is told is what the cache holds."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING

import grpc
import pytest
from tests.lanes.vllm.telemetry.conftest import BLOCK
from tests.lanes.vllm.telemetry.wire import Client, Stream, until

if TYPE_CHECKING:
    from tests.unit.kv_events.cache import Subscriber

pytestmark = pytest.mark.engine


def prompt(seed: int, length: int, prefix: list[int] | None = None) -> list[int]:
    return [*(prefix or []), *random.Random(seed).choices(range(100, 900), k=length)]


def chains(subscriber: Subscriber) -> dict[int, list[int]]:
    """Return, for each live block, the tokens from the prompt's beginning to the block's end."""

    def tokens(block_hash: int) -> list[int]:
        parent = subscriber.parents[block_hash]
        before = [] if parent is None else tokens(parent)
        return before + subscriber.tokens[block_hash]

    return {block_hash: tokens(block_hash) for block_hash in subscriber.live}


def blocks_of(sequence: list[int]) -> set[tuple[int, ...]]:
    """Return the prefixes that full blocks of a sequence stand for."""
    return {tuple(sequence[:end]) for end in range(BLOCK, len(sequence) + 1, BLOCK)}


async def flushed(client: Client, stream: Stream) -> None:
    """Empty the cache, and wait until the subscriber knows."""
    assert await client.flush()
    # The engine publishes what a flush did with its next step's events.
    await client.generate([1, 2, 3], 1)
    await until(lambda: not stream.subscriber.live)


async def test_every_stored_block_is_of_the_sequences_served_and_all_of_theirs_are_stored(
    worker: str,
) -> None:
    async with Client(worker) as client, Stream(client, records_first=True) as stream:
        await flushed(client, stream)
        shared = prompt(1, 64)
        prompts = [prompt(2, 40, shared), prompt(3, 70, shared), prompt(4, 100), prompt(5, 20)]
        answers = await asyncio.gather(*(client.generate(ids, 30) for ids in prompts))
        # The last token is sampled and never computed: it is in no block.
        expected = set().union(
            *(blocks_of(ids + answer[:-1]) for ids, answer in zip(prompts, answers, strict=True))
        )
        await until(lambda: len(stream.subscriber.live) >= len(expected))
        assert {tuple(tokens) for tokens in chains(stream.subscriber).values()} == expected
        assert stream.batches[-1].dp_rank == 0


async def test_a_flush_clears_what_a_subscriber_knows(worker: str) -> None:
    async with Client(worker) as client, Stream(client) as stream:
        await client.generate(prompt(6, 64), 2)
        await until(lambda: bool(stream.subscriber.live))
        await flushed(client, stream)
        kinds = [event.WhichOneof("data") for batch in stream.batches for event in batch.events]
        assert "cleared" in kinds


async def test_blocks_that_are_evicted_are_told_and_the_rest_is_really_cached(
    worker: str,
) -> None:
    async with Client(worker) as client, Stream(client, records_first=True) as stream:
        await flushed(client, stream)
        sequences = []
        # 63 blocks hold six of these; the rest must go.
        for seed in range(10):
            ids = prompt(100 + seed, 320)
            sequences.append(ids + (await client.generate(ids, 2))[:-1])
        last = blocks_of(sequences[-1])
        await until(
            lambda: last <= {tuple(tokens) for tokens in chains(stream.subscriber).values()}
        )
        kinds = [event.WhichOneof("data") for batch in stream.batches for event in batch.events]
        assert "removed" in kinds
        assert sum(stream.subscriber.live.values()) <= 63
        known = {tuple(tokens) for tokens in chains(stream.subscriber).values()}
        assert known <= set().union(*map(blocks_of, sequences))


async def test_subscribers_that_join_at_any_time_know_the_same(worker: str) -> None:
    async with Client(worker) as client, Stream(client, records_first=True) as first:
        await flushed(client, first)
        joined: list[Stream] = []
        try:
            for seed in range(5):
                joined.append(await Stream(client).__aenter__())
                await client.generate(prompt(200 + seed, 96), 3)
            await until(lambda: len(first.subscriber.live) == 15)
            joined.append(await Stream(client).__aenter__())
            for stream in joined:
                await until(
                    lambda stream=stream: stream.subscriber.cursor == first.subscriber.cursor
                )
                assert stream.subscriber.live == first.subscriber.live
        finally:
            for stream in joined:
                await stream.__aexit__(None, None, None)


async def test_a_stream_resumes_or_says_that_it_cannot(worker: str) -> None:
    async with Client(worker) as client, Stream(client) as stream:
        for seed in (300, 301):
            await client.generate(prompt(seed, 64), 2)
        await until(lambda: (stream.subscriber.cursor or 0) >= 2)
        await asyncio.sleep(0.5)
        cursor = stream.subscriber.cursor
        assert cursor is not None
        async with Stream(client, cursor) as resumed:
            await until(lambda: resumed.subscriber.cursor == cursor)
            assert not resumed.subscriber.snapshots
        refused = Stream(client, cursor + 1000)
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await refused.task
        assert failure.value.code() is grpc.StatusCode.OUT_OF_RANGE


async def test_load_records_follow_a_request_and_come_to_rest(worker: str) -> None:
    async with Client(worker) as client, Stream(client, records_first=True) as stream:
        subscriber = stream.subscriber
        await asyncio.gather(*(client.generate(prompt(400 + n, 64), 40) for n in range(6)))
        await until(lambda: subscriber.records[-1].running_requests == 0)
        records = subscriber.records
        assert max(record.running_requests for record in records) == 4
        assert max(record.waiting_requests for record in records) >= 2
        assert max(record.prefill_pending_tokens for record in records) >= 64
        assert max(record.waiting_uncached_tokens for record in records) > 0
        assert max(record.gen_throughput for record in records) > 0
        assert max(record.token_usage for record in records) > 0
        assert {record.max_running_requests for record in records} == {4}
        assert all(record.engine_reports_steps for record in records)
        await until(lambda: not records[-1].HasField("engine_silence_ms"))
        assert (records[-1].waiting_requests, records[-1].prefill_pending_tokens) == (0, 0)
        # And then the heart beats.
        count = len(records)
        await until(lambda: len(records) >= count + 2, seconds=5)


async def test_streams_that_were_cancelled_do_not_disturb_the_others(worker: str) -> None:
    async with Client(worker) as client, Stream(client, records_first=True) as stream:
        for _ in range(20):
            async with Stream(client, records_first=True) as other:
                await until(lambda other=other: bool(other.batches))
        before = stream.subscriber.cursor
        await client.generate(prompt(500, 64), 2)
        await until(lambda: stream.subscriber.cursor != before)

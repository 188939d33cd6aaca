"""GetLoads on the real engine."""

from __future__ import annotations

import asyncio
from datetime import datetime

import grpc
import pytest
from smg_grpc_proto.generated import vllm_engine_pb2 as pb
from tests.lanes.vllm.telemetry.conftest import BLOCK, MAX_NUM_SEQS
from tests.lanes.vllm.telemetry.wire import Client

pytestmark = pytest.mark.engine


async def idle(client: Client) -> pb.SchedulerLoad:
    """Wait until the engine is at rest, and return its load."""
    for _ in range(500):
        [load] = (await client.loads()).loads
        if load.num_total_reqs == 0:
            return load
        await asyncio.sleep(0.02)
    raise AssertionError("the engine never came to rest")


async def test_an_idle_engine_has_its_capacity_and_no_requests(worker: str) -> None:
    import vllm

    async with Client(worker) as client:
        load = await idle(client)
        response = await client.loads()
        assert load.max_total_num_tokens == 64 * BLOCK
        assert load.max_running_requests == MAX_NUM_SEQS
        assert load.num_used_tokens == 0
        assert load.token_usage == 0.0
        assert (response.dp_rank_count, response.version) == (1, vllm.__version__)
        assert datetime.fromisoformat(response.timestamp).tzinfo is not None


async def test_running_and_waiting_requests_are_counted_and_return_to_none(worker: str) -> None:
    async with Client(worker) as client:
        requests = [
            asyncio.create_task(client.generate(list(range(100 + n, 160 + n)), 60))
            for n in range(7)
        ]
        seen: list[pb.SchedulerLoad] = []
        while not all(request.done() for request in requests):
            seen += (await client.loads()).loads
            await asyncio.sleep(0.01)
        full = [load for load in seen if load.num_running_reqs == MAX_NUM_SEQS]
        assert any(load.num_waiting_reqs == 3 for load in full)
        assert all(load.num_total_reqs <= 7 for load in seen)
        assert max(load.num_waiting_uncached_tokens for load in full) > 0
        assert max(load.gen_throughput for load in seen) > 0
        busiest = max(full, key=lambda load: load.num_used_tokens)
        assert busiest.num_used_tokens >= MAX_NUM_SEQS * 2 * BLOCK
        assert busiest.num_used_tokens % BLOCK == 0
        assert busiest.token_usage == pytest.approx(busiest.num_used_tokens / (63 * BLOCK))
        assert (await idle(client)).num_used_tokens == 0


async def test_a_prompt_served_from_the_cache_raises_the_hit_rate(worker: str) -> None:
    async with Client(worker) as client:
        ids = list(range(200, 200 + 4 * BLOCK + 1))
        await client.generate(ids, 2)
        before = (await idle(client)).cache_hit_rate
        for _ in range(3):
            await client.generate(ids, 2)
        assert (await idle(client)).cache_hit_rate > before


@pytest.mark.parametrize(("rank", "answers"), [(0, 1), (1, 0), (-1, 0), (7, 0)])
async def test_the_rank_filter_is_honoured(worker: str, rank: int, answers: int) -> None:
    async with Client(worker) as client:
        response = await client.loads(dp_rank=rank)
        assert len(response.loads) == response.dp_rank_count == answers


async def test_sections_are_honoured(worker: str) -> None:
    async with Client(worker) as client:
        for include in (["core"], ["all"], ["memory", "core"]):
            [load] = (await client.loads(include=include)).loads
            assert load.max_total_num_tokens == 64 * BLOCK
        for include in (["memory"], ["spec", "lora"], ["disagg", "queues"]):
            [load] = (await client.loads(include=include)).loads
            assert load == pb.SchedulerLoad(dp_rank=0)
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await client.loads(include=["core", "moon"])
        assert failure.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "include is 'moon'" in (failure.value.details() or "")

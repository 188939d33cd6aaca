from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from smg_grpc_servicer.serving.health import Health, HealthServicer, State
from smg_wire.errors import EngineDead, Unavailable
from smg_wire.observability import WorkerMetrics

if TYPE_CHECKING:
    from tests.unit.serving.conftest import Bench

UNKNOWN, SERVING, NOT_SERVING, SERVICE_UNKNOWN = range(4)
SERVICE = "some.Service"


def request(service: str = "") -> Any:
    return health_pb2.HealthCheckRequest(service=service)


async def next_status(watch: Any) -> int:
    return (await asyncio.wait_for(watch.read(), 5)).status


async def test_the_state_goes_forward_only() -> None:
    health, seen = Health(), []
    health.subscribe(seen.append)
    for state in (
        State.WARMING,
        State.STARTING,
        State.SERVING,
        State.SERVING,
        State.WARMING,
        State.DRAINING,
        State.SERVING,
        State.DEAD,
        State.DRAINING,
    ):
        health.to(state)
    assert seen == [State.STARTING, State.WARMING, State.SERVING, State.DRAINING, State.DEAD]


async def test_a_state_may_be_skipped_but_not_returned_to() -> None:
    health = Health()
    health.to(State.DEAD)
    health.to(State.SERVING)
    assert health.state is State.DEAD


async def test_a_listener_that_left_hears_nothing_more() -> None:
    health, seen = Health(), []
    leave = health.subscribe(seen.append)
    leave()
    health.to(State.SERVING)
    assert seen == [State.STARTING]


async def test_a_listener_that_leaves_while_it_is_told_costs_the_others_nothing() -> None:
    health, seen = Health(), []
    health.subscribe(lambda state: leave() if state is State.SERVING else None)
    leave = health.subscribe(lambda _: None)
    health.subscribe(seen.append)
    health.to(State.SERVING)
    assert seen == [State.STARTING, State.SERVING]


async def test_each_state_but_serving_refuses_and_says_why() -> None:
    for state in State:
        health = Health()
        health.to(state)
        refusal = health.refusal()
        if state is State.SERVING:
            assert refusal is None
        else:
            assert isinstance(refusal, EngineDead if state is State.DEAD else Unavailable)
            assert state.label in refusal.message


@pytest.mark.parametrize("service", ["", SERVICE])
async def test_check_follows_every_state(bench: Bench, service: str) -> None:
    stub = health_pb2_grpc.HealthStub(await bench.serve(services=[SERVICE]))
    for state in State:
        bench.health.to(state)
        expected = SERVING if state is State.SERVING else NOT_SERVING
        assert (await stub.Check(request(service))).status == expected


async def test_check_of_an_unknown_service_is_not_found_and_names_it(bench: Bench) -> None:
    stub = health_pb2_grpc.HealthStub(await bench.serve(services=[SERVICE]))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Check(request("no.Such"))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    assert "no.Such" in (caught.value.details() or "")


async def test_list_shows_every_service(bench: Bench) -> None:
    stub = health_pb2_grpc.HealthStub(await bench.serve(services=[SERVICE]))
    bench.health.to(State.SERVING)
    response = await stub.List(health_pb2.HealthListRequest())
    assert {name: status.status for name, status in response.statuses.items()} == {
        "": SERVING,
        SERVICE: SERVING,
    }


@pytest.mark.parametrize("service", ["", SERVICE])
async def test_watch_streams_every_transition(bench: Bench, service: str) -> None:
    stub = health_pb2_grpc.HealthStub(await bench.serve(services=[SERVICE]))
    watch = stub.Watch(request(service))
    assert await next_status(watch) == NOT_SERVING
    bench.health.to(State.WARMING)
    bench.health.to(State.SERVING)
    assert await next_status(watch) == SERVING
    bench.health.to(State.DRAINING)
    assert await next_status(watch) == NOT_SERVING
    bench.health.to(State.DEAD)
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(watch.read(), 0.1)
    watch.cancel()


async def test_watch_skips_no_transition_however_fast_they_come(bench: Bench) -> None:
    stub = health_pb2_grpc.HealthStub(await bench.serve())
    watch = stub.Watch(request())
    assert await next_status(watch) == NOT_SERVING
    for state in (State.WARMING, State.SERVING, State.DRAINING):
        bench.health.to(state)
    assert [await next_status(watch) for _ in range(2)] == [SERVING, NOT_SERVING]
    watch.cancel()


async def test_check_of_a_name_that_no_status_has_room_for_is_not_found_as_well(
    bench: Bench,
) -> None:
    channel = await bench.serve(services=[SERVICE])
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await health_pb2_grpc.HealthStub(channel).Check(request("z" * 100_000))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_watch_of_an_unknown_service_says_so_and_stays_open(bench: Bench) -> None:
    stub = health_pb2_grpc.HealthStub(await bench.serve(services=[SERVICE]))
    watch = stub.Watch(request("no.Such"))
    assert await next_status(watch) == SERVICE_UNKNOWN
    bench.health.to(State.SERVING)
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(watch.read(), 0.1)
    watch.cancel()


async def test_a_watcher_that_never_reads_blocks_nobody() -> None:
    health = Health()
    servicer = HealthServicer(health, [])
    # Not a socket, whose buffers would swallow these few bytes: a generator nobody advances.
    stuck = servicer.Watch(request(), None)
    assert (await stuck.__anext__()).status == NOT_SERVING
    reading = servicer.Watch(request(), None)
    assert (await reading.__anext__()).status == NOT_SERVING
    health.to(State.SERVING)
    assert (await asyncio.wait_for(reading.__anext__(), 1)).status == SERVING
    health.to(State.DRAINING)
    assert (await asyncio.wait_for(reading.__anext__(), 1)).status == NOT_SERVING
    assert (await servicer.Check(request(), None)).status == NOT_SERVING
    # It finds all of them when it comes back.
    assert [(await stuck.__anext__()).status for _ in range(2)] == [SERVING, NOT_SERVING]
    await stuck.aclose()
    await reading.aclose()


async def test_a_watcher_that_leaves_is_forgotten(bench: Bench) -> None:
    stub = health_pb2_grpc.HealthStub(await bench.serve())
    listeners = len(bench.health._listeners)
    watches = [stub.Watch(request()) for _ in range(5)]
    for watch in watches:
        await next_status(watch)
    assert len(bench.health._listeners) == listeners + 5
    for watch in watches:
        watch.cancel()
    for _ in range(100):
        if len(bench.health._listeners) == listeners:
            break
        await asyncio.sleep(0.02)
    assert len(bench.health._listeners) == listeners


async def test_the_state_is_a_metric_with_one_one() -> None:
    metrics = WorkerMetrics("fake")
    labels = [state.label for state in State]
    health = Health()
    health.subscribe(lambda state: metrics.set_state(state.label, labels))
    for state in State:
        health.to(state)
        values = {
            label: metrics.registry.get_sample_value("smg_worker_state", {"state": label})
            for label in labels
        }
        assert values == {label: float(label == state.label) for label in labels}

"""The worker under a launcher that behaves as vLLM's, on an engine client that does nothing."""

from __future__ import annotations

import asyncio
import logging
import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import grpc
import pytest
import pytest_asyncio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from smg_grpc_servicer.serving.health import State
from smg_grpc_servicer.vllm import launcher, under_launcher, worker
from smg_grpc_servicer.vllm.health_servicer import VllmHealthServicer
from smg_grpc_servicer.vllm.worker import VllmWorker, worker_of
from smg_wire.errors import EngineDead, Unavailable

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.unit.vllm.conftest import EngineClient

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.fixture
def exits(monkeypatch: pytest.MonkeyPatch) -> asyncio.Queue[int]:
    codes: asyncio.Queue[int] = asyncio.Queue()
    monkeypatch.setattr(under_launcher, "leave", codes.put_nowait)
    return codes


@pytest.fixture(autouse=True)
def _no_end_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    # It would come after the test, when nothing stands in for the end any more.
    monkeypatch.setattr(under_launcher, "_bound_the_exit", lambda _: None)


@pytest_asyncio.fixture
async def launched(
    engine_client: Any, monkeypatch: pytest.MonkeyPatch, exits: asyncio.Queue[int]
) -> AsyncIterator[VllmWorker]:
    del exits
    flags = SimpleNamespace(host="127.0.0.1", port=0, api_key=["k"])
    monkeypatch.setattr(launcher, "arguments", lambda: flags)
    monkeypatch.setattr(worker, "configure_logging", lambda *_: None)
    monkeypatch.setattr(worker.plugin, "report_kv_events", lambda *_: None)
    monkeypatch.setattr(worker, "EngineBridge", lambda *_: SimpleNamespace(abort=lambda _: None))
    build = grpc.aio.server
    made = worker_of(engine_client)
    yield made
    grpc.aio.server = build
    await made.stop()


async def test_one_engine_client_has_one_worker(launched: VllmWorker, engine_client: Any) -> None:
    assert worker_of(engine_client) is launched
    assert launched.health.state is State.SERVING


async def test_a_dead_engine_fails_all_and_ends_the_process(
    launched: VllmWorker, engine_client: EngineClient, exits: asyncio.Queue[int]
) -> None:
    generation = launched.generations.open("a")

    async def reader() -> None:
        async with generation:
            await generation.collect()

    reading = asyncio.ensure_future(reader())
    await asyncio.sleep(0.01)
    engine_client.errored = True
    with pytest.raises(EngineDead):
        await asyncio.wait_for(reading, 2)
    assert launched.health.state is State.DEAD
    assert await asyncio.wait_for(exits.get(), 2) == 1
    assert engine_client.shut_down.is_set()


async def test_a_stream_that_never_ends_does_not_hold_the_end(
    launched: VllmWorker,
    engine_client: EngineClient,
    exits: asyncio.Queue[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(under_launcher, "_FLUSH_SECONDS", 0.1)
    launched.generations.open("a")
    engine_client.errored = True
    assert await asyncio.wait_for(exits.get(), 2) == 1


async def test_a_drain_shows_at_once_and_cuts_before_the_launcher_does(
    launched: VllmWorker, engine_client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(under_launcher, "_CUT_SECONDS", 0.1)
    generation = launched.generations.open("a")
    VllmHealthServicer(engine_client).set_not_serving()
    assert launched.health.state is State.DRAINING
    with pytest.raises(Unavailable):
        launched.generations.open("b")
    with pytest.raises(Unavailable, match="shut down"):
        await asyncio.wait_for(generation.collect(), 2)


async def test_a_drain_that_the_launcher_will_cut_short_is_announced(
    engine_client: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(worker, "EngineBridge", lambda *_: SimpleNamespace(abort=lambda _: None))
    monkeypatch.setenv("SMG_DRAIN_TIMEOUT", "60")
    made = worker_of(engine_client)
    with caplog.at_level(logging.WARNING):
        under_launcher.drain(made)
    assert "60" in caplog.text
    await made.stop()


async def test_the_launchers_own_end_is_no_death_of_the_engine(
    launched: VllmWorker, engine_client: EngineClient, exits: asyncio.Queue[int]
) -> None:
    under_launcher.drain(launched)
    # vLLM stops its engine last, and returns; the loop then ends with what still runs.
    engine_client.errored = True
    await asyncio.sleep(0.2)
    assert exits.empty()
    await launched.stop()
    assert launched.health.state is State.DRAINING


def test_a_process_that_does_not_end_after_its_engine_is_ended_and_shows_where_it_stood(
    engine_client: EngineClient, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    codes: list[int] = []
    monkeypatch.setattr(under_launcher, "leave", codes.append)
    monkeypatch.setattr(under_launcher, "_EXIT_SECONDS", 0.1)
    stopped: Any = SimpleNamespace(engine_client=engine_client)
    ending = threading.Thread(target=under_launcher._leave_if_stuck, args=(stopped,))
    ending.start()
    ending.join(0.3)
    assert codes == [], "the engine still runs"
    engine_client.errored = True
    ending.join(5)
    assert codes == [0]
    assert "_leave_if_stuck" in capfd.readouterr().err


async def test_health_is_guarded_and_streams_every_change(
    launched: VllmWorker, engine_client: Any
) -> None:
    servicer = VllmHealthServicer(engine_client)
    server = grpc.aio.server()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Check(health_pb2.HealthCheckRequest(service="no.Such"))
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        watch = stub.Watch(health_pb2.HealthCheckRequest(service=worker.SERVICE))
        assert (await watch.read()).status == SERVING
        servicer.set_not_serving()
        assert (await asyncio.wait_for(watch.read(), 2)).status == NOT_SERVING
        watch.cancel()
    await server.stop(None)

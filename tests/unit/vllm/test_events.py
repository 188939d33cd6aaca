"""Where vLLM's publishers are found, with its objects stood in for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from smg_grpc_proto.generated import common_pb2 as pb
from tests.unit.kv_events.publisher import Publisher, stored

from smg_grpc_servicer.kv_events import Endpoint
from smg_grpc_servicer.loads import Capacity, LoadBoard
from smg_grpc_servicer.serving.health import Health, State
from smg_grpc_servicer.vllm.events import KvEvents, endpoints
from smg_wire.errors import EngineDead, SmgError, Unavailable, Unimplemented

if TYPE_CHECKING:
    from pathlib import Path


def events(endpoint: str, replay: str | None = None, **fields: Any) -> Any:
    return SimpleNamespace(
        **{
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": endpoint,
            "replay_endpoint": replay,
            "topic": "",
            **fields,
        }
    )


def found(configured: Any, told: dict[int, Any] | None = None) -> list[Endpoint]:
    engine = SimpleNamespace(get_kv_event_sources=lambda: told or {0: configured})
    return endpoints(engine, SimpleNamespace(kv_events_config=configured))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("configured", "address", "bind"),
    [
        ("tcp://*:5557", "tcp://127.0.0.1:5557", False),
        ("tcp://[::]:5557", "tcp://[::1]:5557", False),
        ("ipc:///tmp/x", "ipc:///tmp/x", False),
        ("tcp://127.0.0.1:5557", "tcp://127.0.0.1:5557", True),
        ("tcp://localhost:5557", "tcp://localhost:5557", True),
    ],
)
def test_who_listens_is_who_vllm_takes_it_to_be(configured: str, address: str, bind: bool) -> None:
    assert found(events(configured)) == [Endpoint(0, address, bind=bind)]


def test_the_replay_socket_and_the_topic_are_the_publishers() -> None:
    [endpoint] = found(events("tcp://*:1", "tcp://*:2", topic="kv"))
    assert (endpoint.replay, endpoint.topic) == ("tcp://127.0.0.1:2", "kv")


def test_an_address_that_the_engine_chose_itself_is_connected_to() -> None:
    told = {1: events("tcp://10.0.0.7:41001"), 0: events("tcp://10.0.0.7:41000")}
    assert found(events("tcp://*:0"), told) == [
        Endpoint(0, "tcp://10.0.0.7:41000"),
        Endpoint(1, "tcp://10.0.0.7:41001"),
    ]


@pytest.mark.parametrize(
    ("configured", "why"),
    [
        (None, "--kv-events-config"),
        (events("tcp://*:1", enable_kv_cache_events=False), "--kv-events-config"),
        (events("tcp://*:1", publisher="null"), "'null'"),
        (events("inproc://x"), "its own process"),
        (events("tcp://collector:5557"), "tcp://collector:5557"),
    ],
)
async def test_events_that_cannot_be_read_from_here_are_unimplemented_and_why_is_said(
    configured: Any, why: str
) -> None:
    with pytest.raises(Unimplemented, match=why):
        found(configured)
    loads = LoadBoard({0: Capacity()})
    config: Any = SimpleNamespace(kv_events_config=configured)
    kv_events = KvEvents(SimpleNamespace(), config, loads, Health())
    kv_events.start()
    with pytest.raises(Unimplemented, match=why):
        await anext(kv_events.subscribe(pb.SubscribeKvEventsRequest()))
    await kv_events.close()


@pytest.mark.parametrize(
    ("state", "error"), [(State.DRAINING, Unavailable), (State.DEAD, EngineDead)]
)
async def test_streams_follow_the_workers_life(
    tmp_path: Path, state: State, error: type[SmgError]
) -> None:
    health = Health()
    with Publisher(tmp_path) as publisher:
        configured = events(publisher.events, publisher.replay)
        engine = SimpleNamespace(get_kv_event_sources=lambda: {0: configured})
        config: Any = SimpleNamespace(kv_events_config=configured)
        kv_events = KvEvents(engine, config, LoadBoard({0: Capacity()}), health)
        kv_events.start()
        # Transient, so never UNIMPLEMENTED: a router would not ask again.
        with pytest.raises(Unavailable):
            await anext(kv_events.subscribe(pb.SubscribeKvEventsRequest()))
        health.to(State.SERVING)
        publisher.publish(stored([1], [1, 2]))
        batches = kv_events.subscribe(pb.SubscribeKvEventsRequest())
        assert (await anext(batches)).sequence_number == 0
        health.to(state)
        with pytest.raises(error):
            await anext(batches)
        with pytest.raises(error):
            await anext(kv_events.subscribe(pb.SubscribeKvEventsRequest()))
        await kv_events.close()

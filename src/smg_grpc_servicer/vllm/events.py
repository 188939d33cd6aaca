"""vLLM's KV events: where its publishers are, and the stream that SubscribeKvEvents answers."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from smg_grpc_servicer.kv_events import Endpoint, KvEventRelay, RelayLimits
from smg_grpc_servicer.serving.health import State
from smg_grpc_servicer.vllm.loads import managed_ranks
from smg_wire.errors import EngineDead, Unavailable, Unimplemented

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from smg_grpc_proto.generated import common_pb2
    from vllm.config import VllmConfig
    from vllm.config.kv_events import KVEventsConfig

    from smg_grpc_servicer.loads import LoadBoard
    from smg_grpc_servicer.serving.health import Health

_logger = logging.getLogger(__name__)

_WILDCARDS = ("*", "0.0.0.0", "[::]", "::")
_LOOPBACKS = ("127.0.0.1", "localhost", "[::1]")


class KvEvents:
    """The KV events of one engine client, from `start` to `close`.

    Streams end with UNAVAILABLE when the worker drains or its engine dies. Where the engine
    publishes nothing that can be read from here, `reason` says why, and every subscription is
    UNIMPLEMENTED.
    """

    def __init__(
        self,
        engine_client: Any,
        config: VllmConfig,
        loads: LoadBoard,
        health: Health,
        limits: RelayLimits | None = None,
    ) -> None:
        self._health = health
        self._unsubscribe: Callable[[], None] = lambda: None
        self._relay: KvEventRelay | None = None
        self.reason = ""
        try:
            self._relay = KvEventRelay(endpoints(engine_client, config), loads, limits)
        except Unimplemented as error:
            self.reason = error.message

    def start(self) -> None:
        """Begin to read. Needs a running event loop."""
        if self._relay is None:
            _logger.info("KV events are off: %s", self.reason)
            return
        self._relay.start()
        self._unsubscribe = self._health.subscribe(self._state_changed)

    async def close(self) -> None:
        """End all streams, and close the sockets."""
        self._unsubscribe()
        self._unsubscribe = lambda: None
        if self._relay is not None:
            await self._relay.close()

    async def subscribe(
        self, request: common_pb2.SubscribeKvEventsRequest
    ) -> AsyncIterator[common_pb2.KvEventBatch]:
        """Yield batches for ever; see `KvEventRelay.subscribe` for how it ends.

        Raises:
            Unimplemented: the engine publishes no events that can be read from here.
            Unavailable: the worker does not serve yet, or no longer.
        """
        if self._relay is None:
            raise Unimplemented(f"KV events are off: {self.reason}")
        refusal = self._health.refusal()
        if refusal is not None:
            raise refusal
        batches = self._relay.subscribe(request)
        try:
            async for batch in batches:
                yield batch
        finally:
            # At once, and not when the garbage collector finds the inner generator.
            await batches.aclose()  # type: ignore[attr-defined]

    def _state_changed(self, state: State) -> None:
        # Open streams would hold up the server's stop for all of its grace.
        if self._relay is not None and state is State.DRAINING:
            self._relay.end_streams(Unavailable("the worker is draining"))
        elif self._relay is not None and state is State.DEAD:
            self._relay.end_streams(EngineDead("the engine is dead; this worker is about to exit"))


def endpoints(engine_client: Any, config: VllmConfig) -> list[Endpoint]:
    """Return where each rank's publisher is.

    Raises:
        Unimplemented: there are none, or they cannot be reached from this process.
    """
    events = config.kv_events_config
    if events is None or not events.enable_kv_cache_events:
        raise Unimplemented("the engine was started without them (--kv-events-config)")
    if events.publisher != "zmq":
        raise Unimplemented(f"the engine's publisher is {events.publisher!r}, not 'zmq'")
    if events.endpoint.startswith("inproc:"):
        raise Unimplemented(f"the engine publishes in its own process ({events.endpoint})")
    # vLLM binds wildcards and ipc, and connects to anything else: on loopback that is to us.
    connects = events.endpoint.startswith("tcp:") and not _is_wildcard(events.endpoint)
    if connects and _host(events.endpoint) not in _LOOPBACKS:
        raise Unimplemented(f"the engine publishes to {events.endpoint}, not to this worker")
    return [
        Endpoint(
            rank=rank,
            events=_reachable(source.endpoint),
            replay=None if source.replay_endpoint is None else _reachable(source.replay_endpoint),
            topic=source.topic,
            bind=connects,
        )
        for rank, source in sorted(_sources(engine_client, events).items())
    ]


def _sources(engine_client: Any, events: KVEventsConfig) -> dict[int, KVEventsConfig]:
    """Return each managed rank's configuration, with the addresses of its own publisher."""
    # Since 0.32 each engine tells what its publisher was really bound to.
    tell = getattr(engine_client, "get_kv_event_sources", None)
    told: dict[int, KVEventsConfig] = tell() if tell is not None else {}
    if told:
        return told
    from dataclasses import replace

    from vllm.distributed.kv_events import ZmqEventPublisher

    offset = ZmqEventPublisher.offset_endpoint_port
    return {
        rank: replace(
            events,
            endpoint=offset(events.endpoint, rank) or events.endpoint,
            replay_endpoint=offset(events.replay_endpoint, rank),
        )
        for rank in managed_ranks(engine_client)
    }


def _host(address: str) -> str:
    return address.removeprefix("tcp://").rpartition(":")[0]


def _is_wildcard(address: str) -> bool:
    return _host(address) in _WILDCARDS or "*" in address or "::" in address


def _reachable(address: str) -> str:
    """Return the address to connect to for one that something listens on."""
    if not address.startswith("tcp://") or _host(address) not in _WILDCARDS:
        return address
    port = address.rpartition(":")[2]
    return f"tcp://{'[::1]' if '::' in address else '127.0.0.1'}:{port}"

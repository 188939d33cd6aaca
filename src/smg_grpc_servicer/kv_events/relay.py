"""The relay: one reader for each rank's publisher, and any number of subscribers."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from smg_grpc_servicer.kv_events.log import RankLog
from smg_grpc_servicer.kv_events.source import RankSource
from smg_grpc_servicer.kv_events.subscription import Subscription
from smg_wire.errors import SmgError, Unavailable

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    import zmq.asyncio
    from smg_grpc_proto.generated import common_pb2 as pb

    from smg_grpc_servicer.kv_events.source import Endpoint
    from smg_grpc_servicer.loads import LoadBoard

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RelayLimits:
    """How much a relay holds of each rank, and its pace in seconds.

    A live block of 16 tokens costs some 600 bytes; one in the history, some 200.
    """

    history_batches: int = 4096
    history_blocks: int = 65_536
    live_blocks: int = 500_000
    heartbeat: float = 1.0
    coalesce: float = 0.1
    replay_patience: float = 2.0
    probe_every: float = 5.0


class KvEventRelay:
    """Owns the sockets and the tasks that read them; `close` ends both, and every stream.

    Started and used on the event loop's thread.
    """

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        loads: LoadBoard,
        limits: RelayLimits | None = None,
    ) -> None:
        limits = limits or RelayLimits()
        self._endpoints = sorted(endpoints, key=lambda endpoint: endpoint.rank)
        self._loads = loads
        self._limits = limits
        self._logs = [
            RankLog(
                endpoint.rank,
                history_batches=limits.history_batches,
                history_blocks=limits.history_blocks,
                live_blocks=limits.live_blocks,
                changed=self._batches_came,
            )
            for endpoint in self._endpoints
        ]
        self._subscriptions: set[Subscription] = set()
        self._context: zmq.asyncio.Context | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._unsubscribe: Callable[[], None] = lambda: None
        self._refusal: SmgError | None = Unavailable("the KV event relay has not been started")

    def start(self) -> None:
        """Begin to read the publishers. Needs a running event loop."""
        import zmq.asyncio

        # A context of our own: its sockets are closed without touching anybody else's.
        self._context = zmq.asyncio.Context()
        self._unsubscribe = self._loads.subscribe(self._load_changed)
        self._refusal = None
        for endpoint, log in zip(self._endpoints, self._logs, strict=True):
            source = RankSource(
                self._context,
                endpoint,
                log,
                patience=self._limits.replay_patience,
                probe_every=self._limits.probe_every,
            )
            self._tasks.append(asyncio.create_task(self._read(source, endpoint)))

    def end_streams(self, error: SmgError) -> None:
        """End every stream with an error, and refuse new ones with it."""
        self._refusal = error
        for subscription in self._subscriptions:
            subscription.end(error)

    async def close(self) -> None:
        """End every stream, and close what `start` opened. May be called twice."""
        self.end_streams(Unavailable("this worker is closing"))
        self._unsubscribe()
        self._unsubscribe = lambda: None
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        context, self._context = self._context, None
        if context is not None:
            context.destroy(linger=0)

    async def subscribe(
        self, request: pb.SubscribeKvEventsRequest
    ) -> AsyncIterator[pb.KvEventBatch]:
        """Yield what one subscriber gets, until it goes away.

        Raises:
            OutOfRange: `start_sequence_number` names a batch that is not held.
            DataLoss: batches were lost, the engine began anew, or the subscriber was too slow.
            Unavailable: the relay is not started yet, or ends.
        """
        if self._refusal is not None:
            raise self._refusal
        subscription = Subscription(
            request,
            self._logs,
            self._loads.load,
            heartbeat=self._limits.heartbeat,
            coalesce=self._limits.coalesce,
        )
        self._subscriptions.add(subscription)
        messages = subscription.messages()
        try:
            async for message in messages:
                yield message
        finally:
            self._subscriptions.discard(subscription)
            await messages.aclose()  # type: ignore[attr-defined]

    async def _read(self, source: RankSource, endpoint: Endpoint) -> None:
        try:
            await source.run()
        except Exception:
            _logger.exception("KV events of rank %d cannot be read", endpoint.rank)
            self.end_streams(Unavailable(f"the KV events of rank {endpoint.rank} cannot be read"))

    def _batches_came(self) -> None:
        for subscription in self._subscriptions:
            subscription.batches_came()

    def _load_changed(self, rank: int) -> None:
        del rank
        for subscription in self._subscriptions:
            subscription.loads_changed()

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest_asyncio
from smg_grpc_proto.generated import common_pb2 as pb
from tests.unit.kv_events.cache import Subscriber

from smg_grpc_servicer.kv_events import Endpoint, KvEventRelay, RelayLimits
from smg_grpc_servicer.loads import Capacity, LoadBoard

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from tests.unit.kv_events.publisher import Publisher


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


async def until(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    for _ in range(int(seconds / 0.005)):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("not in time")


class Stream:
    """A subscription that is read by a task of its own into a `Subscriber`."""

    def __init__(self, relay: KvEventRelay, request: pb.SubscribeKvEventsRequest) -> None:
        self.subscriber = Subscriber()
        self.batches: list[pb.KvEventBatch] = []
        self._messages = relay.subscribe(request)
        self.task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        try:
            async for batch in self._messages:
                self.batches.append(batch)
                self.subscriber.take(batch)
        finally:
            await self._messages.aclose()  # type: ignore[attr-defined]

    async def reached(self, sequence: int) -> Subscriber:
        """Wait until a batch has come; the stream's own error is raised if it ends before."""
        await until(lambda: self.subscriber.cursor == sequence or self.task.done())
        if self.task.done():
            self.task.result()
        assert self.subscriber.cursor == sequence
        return self.subscriber

    @property
    def events(self) -> list[pb.KvEventBatch]:
        return [batch for batch in self.batches if not batch.load.load_only]


class RelayBench:
    """Starts relays and streams; all of them end with the test."""

    def __init__(self, owned: AsyncExitStack) -> None:
        self._owned = owned
        self.loads = LoadBoard({0: Capacity()})

    def relay(
        self,
        publishers: Sequence[Publisher],
        *,
        replay: bool = True,
        **limits: Any,
    ) -> KvEventRelay:
        endpoints = [
            Endpoint(rank, publisher.events, publisher.replay if replay else None)
            for rank, publisher in enumerate(publishers)
        ]
        relay = KvEventRelay(
            endpoints,
            self.loads,
            RelayLimits(**{"probe_every": 0.1, "replay_patience": 1.0, **limits}),
        )
        relay.start()
        self._owned.push_async_callback(relay.close)
        return relay

    def stream(self, relay: KvEventRelay, start: int = 0, *, records_first: bool = False) -> Stream:
        request = pb.SubscribeKvEventsRequest(
            start_sequence_number=start, load_records_before_first_batch=records_first
        )
        stream = Stream(relay, request)
        self._owned.push_async_callback(_ended, stream)
        return stream


async def _ended(stream: Stream) -> None:
    stream.task.cancel()
    await asyncio.gather(stream.task, return_exceptions=True)


@pytest_asyncio.fixture
async def bench() -> AsyncIterator[RelayBench]:
    async with AsyncExitStack() as owned:
        yield RelayBench(owned)

"""Whenever a subscriber joins, it ends with exactly the publisher's live blocks."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st
from smg_grpc_proto.generated import common_pb2 as pb
from tests.unit.kv_events.cache import Subscriber
from tests.unit.kv_events.publisher import CLEARED, removed, stored

from smg_grpc_servicer.kv_events.frames import Batch
from smg_grpc_servicer.kv_events.log import RankLog
from smg_grpc_servicer.kv_events.subscription import Subscription
from smg_wire.errors import DataLoss

HASHES = st.integers(0, 5)
STORE = st.tuples(st.just("store"), HASHES)
REMOVE = st.tuples(st.just("remove"), HASHES)
CLEAR = st.tuples(st.just("clear"), st.just(0))
BATCH = st.lists(st.one_of(STORE, STORE, STORE, REMOVE, REMOVE, CLEAR), min_size=1, max_size=6)
ACTION = st.one_of(
    st.tuples(st.just("publish"), BATCH),
    st.tuples(st.just("publish"), BATCH),
    st.tuples(st.just("join"), st.none()),
    st.tuples(st.just("read"), st.tuples(st.integers(0, 9), st.integers(0, 5))),
    st.tuples(st.just("lose"), st.integers(1, 3)),
    st.tuples(st.just("restart"), st.none()),
)


class Engine:
    """A cache that says what it does; a block's hash names its place in a chain of blocks."""

    def __init__(self) -> None:
        self.live: Counter[int] = Counter()
        self.sequence = 0

    def batch(self, steps: list[tuple[str, int]]) -> Batch:
        events: list[list[object]] = []
        for kind, block in steps:
            if kind == "store":
                parent = block // 2 if block else None
                events.append(stored([block], [block, block + 1], parent=parent))
                self.live[block] += 1
            elif kind == "clear":
                events.append(CLEARED)
                self.live.clear()
            elif self.live[block]:
                events.append(removed(block))
                self.live[block] -= 1
        self.live = +self.live
        self.sequence += 1
        return msgspec.convert((1.0, events), Batch)


class Bench:
    """A log, and readers that have joined it, some of them behind."""

    def __init__(self, history: int) -> None:
        self.subscriptions: list[Subscription] = []
        self.log = RankLog(
            0,
            history_batches=history,
            history_blocks=1000,
            live_blocks=1000,
            changed=self._changed,
        )
        self.log.caught_up()
        self.engine = Engine()
        # Whether all that the engine's cache holds has been told.
        self.whole = True
        self.readers: list[Reader] = []

    def _changed(self) -> None:
        for subscription in self.subscriptions:
            subscription.batches_came()

    def subscribe(self) -> Subscription:
        subscription = Subscription(
            pb.SubscribeKvEventsRequest(), [self.log], lambda _: None, heartbeat=60, coalesce=1
        )
        self.subscriptions.append(subscription)
        return subscription

    async def act(self, kind: str, value: Any) -> None:
        if kind == "publish":
            batch = self.engine.batch(value)
            self.log.apply(self.engine.sequence - 1, batch)
            # After a clear nothing of before is left, whether it was told or not.
            self.whole = self.whole or CLEARED in batch.events
        elif kind == "join":
            self.readers.append(Reader(self))
            await self.readers[-1].read(1)
        elif kind == "read" and self.readers:
            reader, batches = value
            await self.readers[reader % len(self.readers)].read(batches)
        elif kind == "lose":
            for _ in range(value):
                self.engine.batch([("store", 1), ("remove", 2)])
            self.log.lost(self.engine.sequence)
            self.whole = False
        elif kind == "restart":
            self.engine = Engine()
            self.log.restarted()
            self.whole = True

    def check(self, reader: Reader) -> None:
        live = reader.subscriber.live
        if self.whole:
            assert live == self.engine.live
            assert self.log.live.unknown_before == 0
        else:
            # What happened unseen is not known; what is told is a part of the truth.
            assert not live - self.engine.live
            assert self.log.live.unknown_before > 0


class Reader:
    """A subscriber that subscribes again from 0 when it is told that data was lost."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._begin()

    def _begin(self) -> None:
        self.subscriber = Subscriber()
        self._messages = self._bench.subscribe().messages()
        self._next = asyncio.ensure_future(anext(self._messages))

    async def read(self, most: int) -> None:
        """Take so many batches, or all there are."""
        for _ in range(most):
            for _ in range(4):
                await asyncio.sleep(0)
            if not self._next.done():
                return
            try:
                self.subscriber.take(self._next.result())
            except DataLoss:
                self._begin()
            else:
                self._next = asyncio.ensure_future(anext(self._messages))

    async def leave(self) -> None:
        self._next.cancel()
        await asyncio.gather(self._next, return_exceptions=True)
        await self._messages.aclose()  # type: ignore[attr-defined]


@settings(max_examples=300, deadline=None)
@given(st.lists(ACTION, max_size=40), st.integers(1, 8))
def test_a_subscriber_that_joins_at_any_time_ends_with_the_engines_live_blocks(
    actions: list[tuple[str, Any]], history: int
) -> None:
    async def play() -> None:
        bench = Bench(history)
        for kind, value in [("join", None), *actions, ("join", None)]:
            await bench.act(kind, value)
        for reader in bench.readers:
            await reader.read(10_000)
            bench.check(reader)
            await reader.leave()

    asyncio.run(play())

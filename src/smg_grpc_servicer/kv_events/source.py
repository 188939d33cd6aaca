"""One rank's publisher, read so that nothing is missed unnoticed.

Batches reach the sink in order and once each. What the subscription misses is fetched from the
publisher's replay socket, while live batches wait in the subscription's own queue. What cannot be
fetched is reported as lost. A sequence that falls back is another publisher in the old one's
place, and is reported as a restart.
"""

from __future__ import annotations

import asyncio
import logging
import zlib
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from smg_grpc_servicer.kv_events.frames import Frame, Undecodable, read_batch, read_frame
from smg_grpc_servicer.kv_events.replay import replay

if TYPE_CHECKING:
    import zmq.asyncio

    from smg_grpc_servicer.kv_events.frames import Batch

_logger = logging.getLogger(__name__)

# How many applied batches are remembered, to tell a late duplicate from a new publisher.
_REMEMBERED = 20_000
# Batches taken without a pause for the rest of the event loop.
_BURST = 16
_QUEUE_BATCHES = 100_000
# How often a replay socket that does not answer to the end is asked again.
_ATTEMPTS = 3


@dataclass(frozen=True)
class Endpoint:
    """Where one rank's publisher is.

    `replay` is None where the publisher has no replay socket. With `bind` the publisher connects
    to us.
    """

    rank: int
    events: str
    replay: str | None = None
    topic: str = ""
    bind: bool = False


class Sink(Protocol):
    """Takes one rank's batches, in order."""

    def apply(self, sequence: int, batch: Batch) -> None:
        """Take a batch; its sequence follows the one before, or a loss or a restart."""

    def lost(self, sequence: int) -> None:
        """All batches before `sequence` that were not applied are lost for good."""

    def restarted(self) -> None:
        """The publisher began anew at sequence 0: nothing from before is in its cache."""

    def caught_up(self) -> None:
        """What was published before the reading began has been applied, as far as it is held."""


class RankSource:
    """Reads one publisher into a sink until it is cancelled.

    `patience` is how long a replay may be silent, `probe_every` how often a quiet publisher is
    asked whether something was missed, both in seconds.
    """

    def __init__(
        self,
        context: zmq.asyncio.Context,
        endpoint: Endpoint,
        sink: Sink,
        *,
        patience: float = 2.0,
        probe_every: float = 5.0,
    ) -> None:
        self._context = context
        self._endpoint = endpoint
        self._sink = sink
        self._patience = patience
        self._probe_every = probe_every
        self._expected = 0
        self._has_replayed = False
        self._applied: OrderedDict[int, int] = OrderedDict()

    async def run(self) -> None:
        """Read for ever.

        Raises:
            zmq.ZMQError: the endpoint is not one, or another process has it.
        """
        import zmq

        socket = self._context.socket(zmq.SUB)
        socket.linger = 0
        socket.rcvhwm = _QUEUE_BATCHES
        try:
            socket.subscribe(self._endpoint.topic)
            if self._endpoint.bind:
                socket.bind(self._endpoint.events)
            else:
                socket.connect(self._endpoint.events)
            await self._read(socket)
        finally:
            socket.close()

    async def _read(self, socket: zmq.asyncio.Socket) -> None:
        # What was published before we subscribed, and, soon after, what was published while the
        # subscription was on its way.
        await self._catch_up()
        self._sink.caught_up()
        quiet = min(0.2, self._probe_every)
        burst = 0
        while True:
            if await socket.poll(int(quiet * 1000)):
                await self._take(await socket.recv_multipart())
                burst += 1
                if burst % _BURST == 0:
                    await asyncio.sleep(0)
            else:
                # The last batches before a silence may be the ones that were dropped.
                await self._catch_up()
                quiet = self._probe_every

    async def _take(self, parts: list[bytes]) -> None:
        try:
            frame = read_frame(parts)
        except Undecodable as error:
            _logger.warning("KV events of rank %d: %s", self._endpoint.rank, error)
            return
        if frame is None:
            return
        if frame.sequence < self._expected and not self._is_duplicate(frame):
            self._restart()
        if frame.sequence > self._expected:
            await self._catch_up()
        if frame.sequence > self._expected:
            self._lose(frame.sequence)
        if frame.sequence == self._expected:
            self._apply(frame)

    async def _catch_up(self) -> None:
        """Apply what the replay socket has of the batches that follow the last one applied."""
        if self._endpoint.replay is None:
            return
        silences = 0
        while True:
            # One that is known is asked for as well: if it is another now, so is the publisher.
            start = max(self._expected - 1, 0)
            frames, complete = await replay(
                self._context, self._endpoint.replay, start, patience=self._patience
            )
            if complete and not frames and self._has_replayed:
                # It does not have the batch that was its newest: it is another publisher.
                self._restart()
                continue
            self._has_replayed = self._has_replayed or bool(frames)
            before = self._expected
            silences = 0 if complete else silences + 1
            if not await self._merge(frames):
                self._restart()
                continue
            if not complete and silences < _ATTEMPTS:
                continue
            # A hole in the answer may be the socket's fault: ask for as long as that helps.
            if self._expected == before or frames[-1].sequence < self._expected:
                return

    async def _merge(self, frames: list[Frame]) -> bool:
        """Apply the answer to a replay; False if it is not from the publisher known so far."""
        for position, frame in enumerate(frames):
            if position % _BURST == _BURST - 1:
                await asyncio.sleep(0)
            if frame.sequence < self._expected:
                if self._is_duplicate(frame):
                    continue
                return False
            if position == 0 and frame.sequence > self._expected:
                # The replay begins with the oldest batch that it has.
                self._lose(frame.sequence)
            if frame.sequence == self._expected:
                self._apply(frame)
        return True

    def _apply(self, frame: Frame) -> None:
        self._expected = frame.sequence + 1
        self._applied[frame.sequence] = zlib.crc32(frame.payload)
        if len(self._applied) > _REMEMBERED:
            self._applied.popitem(last=False)
        try:
            self._sink.apply(frame.sequence, read_batch(frame.payload))
        except Undecodable as error:
            _logger.warning(
                "KV events of rank %d: batch %d: %s", self._endpoint.rank, frame.sequence, error
            )
            self._sink.lost(self._expected)

    def _is_duplicate(self, frame: Frame) -> bool:
        return self._applied.get(frame.sequence) == zlib.crc32(frame.payload)

    def _lose(self, sequence: int) -> None:
        _logger.warning(
            "KV events of rank %d: batches %d to %d are lost",
            self._endpoint.rank,
            self._expected,
            sequence - 1,
        )
        self._expected = sequence
        self._sink.lost(sequence)

    def _restart(self) -> None:
        _logger.warning("KV events of rank %d: the publisher began anew", self._endpoint.rank)
        self._expected = 0
        self._has_replayed = False
        self._applied.clear()
        self._sink.restarted()

"""A publisher as engines have it: a thread with a PUB and a ROUTER socket, msgpack, a buffer."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any

import msgspec
import zmq

if TYPE_CHECKING:
    from pathlib import Path

    from typing_extensions import Self

END = (-1).to_bytes(8, "big", signed=True)


def stored(
    hashes: list[int],
    tokens: list[int],
    *,
    parent: int | None = None,
    size: int = 2,
    medium: str | None = "GPU",
) -> list[Any]:
    return ["BlockStored", hashes, parent, tokens, size, None, medium]


def removed(*hashes: int, medium: str | None = "GPU") -> list[Any]:
    return ["BlockRemoved", list(hashes), medium]


CLEARED: list[Any] = ["AllBlocksCleared"]


class Publisher:
    """Publishes on ipc sockets in a directory; leaving the block closes them."""

    def __init__(
        self,
        directory: Path,
        *,
        buffer: int = 10_000,
        topic_in_replay: bool = True,
        answer_after: float = 0.0,
    ) -> None:
        self.events = f"ipc://{directory}/events"
        self.replay = f"ipc://{directory}/replay"
        self._buffer: deque[tuple[int, bytes]] = deque(maxlen=buffer)
        self._topic_in_replay = topic_in_replay
        self._answer_after = answer_after
        self._commands: queue.Queue[bytes | None] = queue.Queue()
        self._sequence = 0
        self.replays = 0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._bound = threading.Event()

    def publish(self, *events: Any, drop: bool = False, keep: bool = True) -> int:
        """Publish a batch; `drop` leaves it out of the live stream, `keep` says it is buffered."""
        payload = msgspec.msgpack.encode([time.time(), list(events), 0])
        return self.publish_raw(payload, drop=drop, keep=keep)

    def publish_raw(self, payload: bytes, *, drop: bool = False, keep: bool = True) -> int:
        sequence = self._sequence
        self._sequence += 1
        if keep:
            self._buffer.append((sequence, payload))
        if not drop:
            self._commands.put(sequence.to_bytes(8, "big") + payload)
        return sequence

    def drained(self) -> Self:
        """Wait until all is out: who subscribes now has missed it."""
        self._commands.join()
        return self

    def _run(self) -> None:
        context = zmq.Context()
        live = context.socket(zmq.PUB)
        live.sndhwm = 0
        live.bind(self.events)
        router = context.socket(zmq.ROUTER)
        router.sndhwm = 0
        router.bind(self.replay)
        self._bound.set()
        while True:
            if router.poll(0):
                self._answer(router)
            try:
                message = self._commands.get(timeout=0.01)
            except queue.Empty:
                continue
            if message is None:
                break
            live.send_multipart([b"", message[:8], message[8:]])
            self._commands.task_done()
        live.close(linger=0)
        router.close(linger=0)
        context.term()

    def _answer(self, router: zmq.Socket[bytes]) -> None:
        client, _, start = router.recv_multipart()
        time.sleep(self._answer_after)
        self.replays += 1
        topic = [b""] if self._topic_in_replay else []
        for sequence, payload in list(self._buffer):
            if sequence >= int.from_bytes(start, "big"):
                frames = [client, b"", *topic, sequence.to_bytes(8, "big"), payload]
                router.send_multipart(frames)
        router.send_multipart([client, b"", *topic, END, b""])

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._bound.wait(5)
        return self

    def __exit__(self, *_: object) -> None:
        self._commands.put(None)
        self._thread.join(5)
        assert not self._thread.is_alive()

"""Asking a publisher's replay socket for batches that it still has."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, NamedTuple

from smg_grpc_servicer.kv_events.frames import Frame, Undecodable, read_frame, replay_request

if TYPE_CHECKING:
    import zmq.asyncio

_logger = logging.getLogger(__name__)


class Answer(NamedTuple):
    """Batches in order, and whether the publisher said that these are all."""

    frames: list[Frame]
    complete: bool


async def replay(
    context: zmq.asyncio.Context, endpoint: str, start: int, *, patience: float
) -> Answer:
    """Ask for what the publisher has from sequence `start` on.

    Waits `patience` seconds at most for each message; what has come until then is returned. The
    publisher's socket drops what it cannot send at once, so there may be holes: ask again.
    """
    import zmq

    frames: list[Frame] = []
    # A socket of its own each time: an answer that comes too late is not taken for the next one.
    socket = context.socket(zmq.DEALER)
    socket.linger = 0
    socket.rcvhwm = 0
    try:
        socket.connect(endpoint)
        await socket.send_multipart(replay_request(start))
        # Not asyncio.wait_for: until Python 3.12 it may swallow a cancellation that comes together
        # with a message, and then the reader that is to be cancelled reads on for ever.
        while await socket.poll(int(patience * 1000)):
            frame = read_frame(await socket.recv_multipart())
            if frame is None:
                return Answer(frames, complete=True)
            frames.append(frame)
        _logger.debug("replay from %d at %s: no answer in time", start, endpoint)
    except Undecodable as error:
        _logger.warning("replay at %s: %s", endpoint, error)
    finally:
        socket.close()
    return Answer(frames, complete=False)

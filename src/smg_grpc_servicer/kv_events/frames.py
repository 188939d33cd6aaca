"""What an engine's publisher puts on its socket: frames, and the batch inside the last one.

vLLM, SGLang and TokenSpeed share the framing `[topic, sequence, payload]`: the sequence is eight
bytes, big-endian, counted from 0 by each publisher; the payload is msgpack, an array
`[timestamp, events]` or `[timestamp, events, rank]`, or the same as a map.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

_SEQUENCE_BYTES = 8
# What a replay ends with: -1 as a signed number.
_END = (2**64 - 1).to_bytes(_SEQUENCE_BYTES, "big")


class Undecodable(ValueError):
    """Bytes that are no batch of events."""


class Frame(NamedTuple):
    """One published batch: its number, and the bytes it was packed into."""

    sequence: int
    payload: bytes


class Batch(NamedTuple):
    """The decoded payload: seconds since the epoch, and events as msgpack gives them."""

    timestamp: float
    events: list[Any]


def read_frame(parts: Sequence[bytes]) -> Frame | None:
    """Return the batch in a message of the publisher or of its replay; None for the end marker.

    Replays come with a topic frame (vLLM since 0.31) or without one: the last two frames tell.

    Raises:
        Undecodable: too few frames, or a sequence number that is not eight bytes.
    """
    if len(parts) < 2 or len(parts[-2]) != _SEQUENCE_BYTES:
        raise Undecodable(f"{len(parts)} frames where [topic, sequence, payload] was expected")
    if parts[-2] == _END:
        return None
    return Frame(int.from_bytes(parts[-2], "big"), parts[-1])


def replay_request(start: int) -> list[bytes]:
    """Return the frames that ask a replay socket for all it has from `start` on."""
    return [b"", start.to_bytes(_SEQUENCE_BYTES, "big")]


def read_batch(payload: bytes) -> Batch:
    """Unpack a payload.

    Raises:
        Undecodable: not msgpack, or not a batch.
    """
    import msgspec

    try:
        unpacked = msgspec.msgpack.decode(payload)
    except msgspec.DecodeError as error:
        raise Undecodable(f"not msgpack: {error}") from error
    if isinstance(unpacked, dict):
        unpacked = [unpacked.get("ts"), unpacked.get("events")]
    if not isinstance(unpacked, list) or len(unpacked) < 2:
        raise Undecodable("not an array of a timestamp and events")
    timestamp, events = unpacked[:2]
    if not isinstance(timestamp, (int, float)) or not isinstance(events, list):
        raise Undecodable("not an array of a timestamp and events")
    return Batch(float(timestamp), events)

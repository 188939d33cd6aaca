"""Every error of this project, and the one mapping from an error to a gRPC status.

::

    SmgError                     INTERNAL
    ├── InvalidRequest           INVALID_ARGUMENT    the caller's fault; names field, value, limit
    ├── MalformedMessage         INVALID_ARGUMENT    not a message of the method's type
    ├── EngineRefusal            INVALID_ARGUMENT    the engine's own code 400
    ├── UnsupportedField         INVALID_ARGUMENT    a field this engine cannot honour, by name
    ├── NotFound                 NOT_FOUND
    ├── DuplicateRequest         ALREADY_EXISTS
    ├── Unauthenticated          UNAUTHENTICATED
    ├── FailedPrecondition       FAILED_PRECONDITION
    │   └── ConstraintFailed     FAILED_PRECONDITION + trailer smg-constraint-failed: engine
    ├── Overloaded               RESOURCE_EXHAUSTED  retry elsewhere or later
    ├── DeadlineExceeded         DEADLINE_EXCEEDED
    ├── Unavailable              UNAVAILABLE         starting, draining
    │   └── EngineDead           UNAVAILABLE         the process is about to exit
    ├── Unimplemented            UNIMPLEMENTED
    ├── OutOfRange               OUT_OF_RANGE        a position that a stream cannot resume from
    ├── DataLoss                 DATA_LOSS           a stream lost something; begin it anew
    ├── SettingsError            (stops a start)     exit code 2
    └── StartError               (stops a start)     exit code 3
"""

from __future__ import annotations

import asyncio
import math
from typing import ClassVar

import grpc

Trailers = tuple[tuple[str, str], ...]

# A value is quoted in a refusal; a prompt or a key is not repeated in full there.
_VALUE_CHARS = 64


class Measure(str):
    """The size of a value that is too long to show: "600 tokens" stands as it is, unquoted."""

    __slots__ = ()


def _quoted(value: object) -> str:
    if isinstance(value, Measure):
        return str(value)
    if isinstance(value, float) and math.isfinite(value):
        # Wire floats are 32 bits wide: seven digits are what the caller can have meant.
        return f"{value:.7g}"
    text = repr(value)
    return text if len(text) <= _VALUE_CHARS else f"{text[:_VALUE_CHARS]}…"


class SmgError(Exception):
    """Base of all errors whose text may be shown to a client."""

    status: ClassVar[grpc.StatusCode] = grpc.StatusCode.INTERNAL
    trailers: ClassVar[Trailers] = ()

    @property
    def message(self) -> str:
        """The one line that a client reads."""
        return str(self.args[0]) if self.args else type(self).__name__


class InvalidRequest(SmgError):
    """The caller's fault: says which field, what it held, and what may stand there."""

    status = grpc.StatusCode.INVALID_ARGUMENT

    def __init__(self, field: str, value: object, limit: str) -> None:
        super().__init__(f"{field} is {_quoted(value)}: {limit}")
        self.field = field


class MalformedMessage(SmgError):
    """The bytes of a request are no message of the type that its method takes."""

    status = grpc.StatusCode.INVALID_ARGUMENT


class UnsupportedField(SmgError):
    """A field that the wire carries and this engine cannot honour."""

    status = grpc.StatusCode.INVALID_ARGUMENT

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field} is not supported: {reason}")
        self.field = field


class NotFound(SmgError):
    """Names nothing that exists here."""

    status = grpc.StatusCode.NOT_FOUND


class DuplicateRequest(SmgError):
    """A live request has this id already."""

    status = grpc.StatusCode.ALREADY_EXISTS

    def __init__(self, request_id: str) -> None:
        super().__init__(f"request_id is {_quoted(request_id)}: a live request has this id")


class Unauthenticated(SmgError):
    """No bearer token, or not one of ours."""

    status = grpc.StatusCode.UNAUTHENTICATED


class FailedPrecondition(SmgError):
    """Right in itself, but not for this worker as it was started."""

    status = grpc.StatusCode.FAILED_PRECONDITION


class ConstraintFailed(FailedPrecondition):
    """The engine could not keep the constraint (grammar, schema) that it had accepted."""

    trailers = (("smg-constraint-failed", "engine"),)


class Overloaded(SmgError):
    """A bounded resource is full; the same request may succeed elsewhere or later."""

    status = grpc.StatusCode.RESOURCE_EXHAUSTED


class DeadlineExceeded(SmgError):
    """The time that the request had is over."""

    status = grpc.StatusCode.DEADLINE_EXCEEDED


class Unavailable(SmgError):
    """Not now: the worker is starting or draining."""

    status = grpc.StatusCode.UNAVAILABLE


class EngineDead(Unavailable):
    """The engine died or stalled; the process exits and its supervisor restarts it."""


class Unimplemented(SmgError):
    """This worker has no such method."""

    status = grpc.StatusCode.UNIMPLEMENTED


class OutOfRange(SmgError):
    """A stream cannot begin at the position asked for."""

    status = grpc.StatusCode.OUT_OF_RANGE


class DataLoss(SmgError):
    """Part of a stream is lost for good; what follows makes sense only from a new beginning."""

    status = grpc.StatusCode.DATA_LOSS


class SettingsError(SmgError):
    """A flag or a variable holds a value that it may not hold. Exit code 2."""


class StartError(SmgError):
    """The worker cannot start: a port in use, a missing file or package. Exit code 3."""


_ENGINE_CODES: dict[int, type[SmgError]] = {
    404: NotFound,
    408: DeadlineExceeded,
    429: Overloaded,
    503: Unavailable,
    504: DeadlineExceeded,
}


class EngineRefusal(SmgError):
    """An engine refused a request by its own HTTP-like code 400."""

    status = grpc.StatusCode.INVALID_ARGUMENT


def from_engine_code(code: int, message: str) -> SmgError:
    """Return the error for the HTTP-like code with which an engine aborts a request."""
    if code == 400:
        return EngineRefusal(message)
    return _ENGINE_CODES.get(code, SmgError)(message)


INTERNAL_MESSAGE = "internal error; the worker's log has the details"


def to_status(error: BaseException) -> tuple[grpc.StatusCode, str, Trailers]:
    """Return status, message and trailers for an error; a stranger's text is not shown."""
    if isinstance(error, SmgError):
        return error.status, error.message, error.trailers
    # Two classes until Python 3.11 made them one.
    if isinstance(error, (TimeoutError, asyncio.TimeoutError)):
        return grpc.StatusCode.DEADLINE_EXCEEDED, "the request's deadline passed", ()
    return grpc.StatusCode.INTERNAL, INTERNAL_MESSAGE, ()

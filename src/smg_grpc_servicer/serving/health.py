"""One state machine for a worker, and the grpc.health.v1 service that shows it.

::

    STARTING ──> WARMING ──> SERVING ──> DRAINING
        └───────────┴───────────┴───────────┴──> DEAD

The state never goes back: a worker that drained or died is replaced by a new process.
"""

from __future__ import annotations

import asyncio
import enum
import logging
from typing import TYPE_CHECKING, Any

from grpc_health.v1 import health_pb2, health_pb2_grpc

from smg_wire.errors import EngineDead, NotFound, SmgError, Unavailable

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable

    import grpc

_logger = logging.getLogger(__name__)

_MOST_NAME_CHARS = 256


class State(enum.IntEnum):
    """A worker's states, in the only order they may follow each other."""

    STARTING = 0
    WARMING = 1
    SERVING = 2
    DRAINING = 3
    DEAD = 4

    @property
    def label(self) -> str:
        """The state in lower case, as metrics and messages show it."""
        return self.name.lower()


STATE_LABELS = [state.label for state in State]


class Health:
    """The state of one worker. Changed and read on the event loop's thread alone."""

    def __init__(self) -> None:
        self._state = State.STARTING
        self._listeners: list[Callable[[State], None]] = []

    @property
    def state(self) -> State:
        """The state now."""
        return self._state

    def subscribe(self, listener: Callable[[State], None]) -> Callable[[], None]:
        """Call `listener` with the state now and at each change; return what ends that."""
        self._listeners.append(listener)
        listener(self._state)
        return lambda: self._listeners.remove(listener)

    def to(self, state: State) -> None:
        """Go to a later state; going back or staying does nothing."""
        if state <= self._state:
            return
        _logger.info("worker is %s (was %s)", state.label, self._state.label)
        self._state = state
        for listener in list(self._listeners):
            listener(state)

    def refusal(self) -> SmgError | None:
        """Return the error for a request that comes now, or None while serving."""
        if self._state is State.SERVING:
            return None
        if self._state is State.DEAD:
            return EngineDead("the engine is dead; this worker is about to exit")
        return Unavailable(f"the worker is {self._state.label}, not serving")


class HealthServicer(health_pb2_grpc.HealthServicer):
    """grpc.health.v1 over a `Health`, for the server as a whole ("") and the services named.

    grpcio-health-checking's own asynchronous servicer holds a service's lock while it writes to
    a watcher, so one watcher that stops reading stops every change of state: here each watcher
    reads the state for itself, and nobody waits for it.
    """

    def __init__(self, health: Health, services: Iterable[str]) -> None:
        self._health = health
        self._services = frozenset(services) | {""}

    def _status(self, service: str, state: State) -> int:
        if service not in self._services:
            return health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
        if state is State.SERVING:
            return health_pb2.HealthCheckResponse.SERVING
        return health_pb2.HealthCheckResponse.NOT_SERVING

    def _response(self, service: str) -> health_pb2.HealthCheckResponse:
        return health_pb2.HealthCheckResponse(status=self._status(service, self._health.state))

    async def Check(
        self,
        request: health_pb2.HealthCheckRequest,
        context: grpc.aio.ServicerContext[
            health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse
        ],
    ) -> health_pb2.HealthCheckResponse:
        """Answer the status of one service; NOT_FOUND for one that is not here."""
        del context
        if request.service not in self._services:
            # A status has no room for a name of any length: the client would get no status at all.
            raise NotFound(f"Unknown service: {request.service[:_MOST_NAME_CHARS]}")
        return self._response(request.service)

    async def List(
        self,
        request: Any,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> Any:
        """Answer the status of every service."""
        del request, context
        return health_pb2.HealthListResponse(  # type: ignore[attr-defined]  # stubs predate it
            statuses={service: self._response(service) for service in sorted(self._services)}
        )

    async def Watch(
        self,
        request: health_pb2.HealthCheckRequest,
        context: grpc.aio.ServicerContext[
            health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse
        ],
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        """Stream the status now and at each change, until the client leaves or the worker ends."""
        del context
        changes: asyncio.Queue[State] = asyncio.Queue()
        unsubscribe = self._health.subscribe(changes.put_nowait)
        sent: int | None = None
        try:
            while True:
                # The state queued and not the state now: no transition is skipped.
                status = self._status(request.service, await changes.get())
                if status != sent:
                    sent = status
                    yield health_pb2.HealthCheckResponse(status=status)
        finally:
            unsubscribe()

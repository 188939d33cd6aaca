"""What stands round every RPC: authentication, error mapping, trace context, the request log.

A worker that builds its own server installs `GuardInterceptor`; one whose engine builds the
server wraps its servicer's methods with the same `Guard`.
"""

from __future__ import annotations

import asyncio
import hmac
import inspect
import logging
import time
from typing import TYPE_CHECKING, Any, NoReturn

import grpc
from google.protobuf.message import DecodeError
from opentelemetry import trace

from smg_wire.errors import MalformedMessage, SmgError, Unauthenticated, Unavailable, to_status
from smg_wire.observability import server_span

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from smg_wire.observability import WorkerMetrics

_logger = logging.getLogger(__name__)

# Probes carry no key, and nothing here is worth a line a second in the log.
_HEALTH_PREFIX = "/grpc.health.v1.Health/"

_UNPARSABLE = "the request does not parse"

Context = grpc.aio.ServicerContext[Any, Any]
Behavior = Any


class _Malformed:
    """Stands in for a request whose bytes did not parse, until there is a context to refuse it."""

    def __init__(self, error: Exception) -> None:
        self.error = error


class Guard:
    """Wraps RPC methods so that each ends in exactly one status, whatever is raised inside."""

    def __init__(self, *, metrics: WorkerMetrics, api_keys: Sequence[str] = ()) -> None:
        self._metrics = metrics
        self._expected = [f"Bearer {key}".encode() for key in api_keys]

    def wrap(self, method: str, behavior: Behavior, *, streams: bool) -> Behavior:
        """Return the guarded form of one RPC method, `/package.Service/Method` by name."""
        behavior = written(behavior)
        if streams:

            async def streaming(request: Any, context: Context) -> None:
                await self._run(method, behavior, request, context)

            return streaming

        async def unary(request: Any, context: Context) -> Any:
            return await self._run(method, behavior, request, context)

        return unary

    async def _run(
        self,
        method: str,
        behavior: Callable[[Any, Context], Awaitable[Any]],
        request: Any,
        context: Context,
    ) -> Any:
        began = time.monotonic()
        metadata = {
            key: value.decode("latin-1") if isinstance(value, bytes) else value
            for key, value in context.invocation_metadata() or ()
        }
        with server_span(method, metadata):
            try:
                self._authenticate(method, metadata)
                _require_parsed(request)
                response = await behavior(request, context)
            except grpc.aio.AbortError:
                raise
            except asyncio.CancelledError:
                # By the client, or inside: then it would hang without a status. The context
                # does not tell which, but a client that has gone takes no status.
                await self._abort(method, context, Unavailable("the request was cancelled here"))
            except DecodeError:
                # A stream of requests is parsed as its handler reads it.
                await self._abort(method, context, MalformedMessage(_UNPARSABLE))
            except Exception as error:
                await self._abort(method, context, error)
            else:
                if not method.startswith(_HEALTH_PREFIX):
                    _logger.debug("%s OK in %.3f s", method, time.monotonic() - began)
                return response

    def _authenticate(self, method: str, metadata: dict[str, str]) -> None:
        if not self._expected or method.startswith(_HEALTH_PREFIX):
            return
        given = metadata.get("authorization", "").encode("latin-1", "replace")
        # Every key is compared, so that the time taken does not tell which one was near.
        if not any([hmac.compare_digest(given, key) for key in self._expected]):  # noqa: C419
            raise Unauthenticated("authorization must be 'Bearer' and this worker's API key")

    async def _abort(self, method: str, context: Context, error: BaseException) -> NoReturn:
        status, message, trailers = to_status(error)
        if not isinstance(error, (SmgError, grpc.aio.InternalError)):
            _logger.error("%s failed", method, exc_info=error)
        try:
            await context.abort(status, message, trailers)
        except grpc.aio.AbortError:
            probe = method.startswith(_HEALTH_PREFIX)
            if not probe:
                self._metrics.refusals.labels(status.name).inc()
            trace.get_current_span().set_status(trace.StatusCode.ERROR, str(error))
            _logger.log(
                logging.DEBUG if probe else logging.INFO, "%s %s: %s", method, status.name, message
            )
            raise
        except grpc.aio.InternalError:
            # grpc could not send: nobody is there. As a cancellation it ends without a log line.
            _logger.debug("%s: its client has gone", method)
            raise asyncio.CancelledError from None
        raise AssertionError("abort returned")


def _require_parsed(request: Any) -> None:
    if isinstance(request, _Malformed):
        raise MalformedMessage(_UNPARSABLE) from request.error


def written(behavior: Behavior) -> Behavior:
    """Turn an async generator method into one that writes; return any other as it is.

    A generator is left suspended when its RPC is cancelled during a write, and its `finally`
    then waits for the garbage collector; closed here, it runs at once.
    """
    if not inspect.isasyncgenfunction(behavior):
        return behavior

    async def writing(request: Any, context: Context) -> None:
        messages = behavior(request, context)
        try:
            async for message in messages:
                await context.write(message)
        finally:
            await messages.aclose()

    return writing


def _tolerant(deserialize: Callable[[bytes], Any] | None) -> Callable[[bytes], Any] | None:
    """Let a message that does not parse reach the guard, which refuses it by status."""
    if deserialize is None:
        return None

    def parse(data: bytes) -> Any:
        try:
            return deserialize(data)
        except DecodeError as error:
            return _Malformed(error)

    return parse


def _as_it_is(method: str, behavior: Behavior, *, streams: bool) -> Behavior:
    del method, streams
    return behavior


class GuardInterceptor(grpc.aio.ServerInterceptor):
    """Puts a `Guard` round every method of a server, health and reflection included.

    A servicer that wrapped its methods itself names its service in `guarded_services`: their
    methods get no second guard here, only the refusal of messages that do not parse.
    """

    def __init__(self, guard: Guard, *, guarded_services: Sequence[str] = ()) -> None:
        self._guard = guard
        self._guarded_prefixes = tuple(f"/{service}/" for service in guarded_services)
        self._handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {}

    async def intercept_service(
        self,
        continuation: Callable[
            [grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]
        ],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Return the guarded handler of a method; a method is guarded once and kept."""
        method = handler_call_details.method
        guarded = self._handlers.get(method)
        if guarded is None:
            handler = await continuation(handler_call_details)
            if handler is None:
                return None
            guarded = self._handlers[method] = self._guarded(method, handler)
        return guarded

    def _guarded(
        self, method: str, handler: grpc.RpcMethodHandler[Any, Any]
    ) -> grpc.RpcMethodHandler[Any, Any]:
        wrap, parse = self._guard.wrap, _tolerant(handler.request_deserializer)
        if method.startswith(self._guarded_prefixes):
            wrap = _as_it_is
        serialize = handler.response_serializer
        if handler.unary_unary is not None:
            return grpc.unary_unary_rpc_method_handler(
                wrap(method, handler.unary_unary, streams=False), parse, serialize
            )
        if handler.unary_stream is not None:
            return grpc.unary_stream_rpc_method_handler(
                wrap(method, handler.unary_stream, streams=True), parse, serialize
            )
        if handler.stream_stream is not None:
            # Only reflection: what it takes is parsed while its handler iterates.
            return grpc.stream_stream_rpc_method_handler(
                wrap(method, handler.stream_stream, streams=True),
                handler.request_deserializer,
                serialize,
            )
        return grpc.stream_unary_rpc_method_handler(
            wrap(method, handler.stream_unary, streams=False),
            handler.request_deserializer,
            serialize,
        )

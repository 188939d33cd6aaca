from __future__ import annotations

import asyncio
import gc
import hmac
import inspect
import logging
import sys
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from smg_grpc_proto.generated import common_pb2, mlx_engine_pb2_grpc
from smg_grpc_proto.generated import mlx_engine_pb2 as pb

from smg_grpc_servicer.serving import interceptors
from smg_wire.errors import ConstraintFailed, InvalidRequest, Overloaded, Unauthenticated

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.unit.serving.conftest import Bench

Code = grpc.StatusCode
SERVICE = "mlx.grpc.engine.MlxEngine"
KEY = "swordfish"


class Servicer(mlx_engine_pb2_grpc.MlxEngineServicer):
    """Raises `error` from each kind of method, after a message where there is a stream."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error
        self.closed = asyncio.Event()
        self.entered = asyncio.Event()
        self.generator: Any = None

    async def GetModelInfo(self, request: Any, context: Any) -> Any:
        if self.error is not None:
            raise self.error
        return pb.GetModelInfoResponse(vocab_size=1)

    async def Generate(self, request: Any, context: Any) -> None:
        await context.write(pb.GenerateResponse())
        self.entered.set()
        if self.error is not None:
            raise self.error
        if request.stream:
            try:
                await asyncio.Event().wait()
            finally:
                self.closed.set()

    async def GetTokenizer(self, request: Any, context: Any) -> AsyncIterator[Any]:
        # Held, so that nothing but a close ends it: the collector is no help.
        frame = sys._getframe()
        self.generator = next(
            thing
            for thing in gc.get_objects()
            if inspect.isasyncgen(thing) and thing.ag_frame is frame
        )
        try:
            yield common_pb2.GetTokenizerChunk(data=b"x")
            self.entered.set()
            if self.error is not None:
                raise self.error
            while True:
                yield common_pb2.GetTokenizerChunk(data=bytes(60_000))
        finally:
            self.closed.set()

    async def Abort(self, request: Any, context: Any) -> Any:
        await context.abort(Code.ABORTED, "by its own hand")

    async def GetServerInfo(self, request: Any, context: Any) -> Any:
        inner = asyncio.ensure_future(asyncio.sleep(60))
        asyncio.get_running_loop().call_soon(inner.cancel)
        await inner


async def serve(bench: Bench, servicer: Servicer, **settings: Any) -> Any:
    def register(server: grpc.aio.Server) -> None:
        mlx_engine_pb2_grpc.add_MlxEngineServicer_to_server(servicer, server)

    return mlx_engine_pb2_grpc.MlxEngineStub(
        await bench.serve(register, services=[SERVICE], **settings)
    )


async def read(call: Any) -> list[Any]:
    return [message async for message in call]


CALLS = {
    "unary": lambda stub: stub.GetModelInfo(pb.GetModelInfoRequest()),
    "stream": lambda stub: read(stub.Generate(pb.GenerateRequest())),
    "generator": lambda stub: read(stub.GetTokenizer(common_pb2.GetTokenizerRequest())),
}


async def failure(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await asyncio.wait_for(call, 10)
    return caught.value


@pytest.mark.parametrize("kind", CALLS)
async def test_an_error_of_the_tree_reaches_the_client_with_its_text(
    bench: Bench, kind: str
) -> None:
    stub = await serve(bench, Servicer(InvalidRequest("top_p", 2.0, "must be in [0, 1]")))
    error = await failure(CALLS[kind](stub))
    assert error.code() is Code.INVALID_ARGUMENT
    assert error.details() == "top_p is 2: must be in [0, 1]"
    await bench.counted("refusals_total", 1, code="INVALID_ARGUMENT")


@pytest.mark.parametrize("kind", CALLS)
async def test_a_stranger_is_hidden_from_the_client_and_shown_in_the_log(
    bench: Bench, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    stub = await serve(bench, Servicer(KeyError("a secret of the server")))
    error = await failure(CALLS[kind](stub))
    assert error.code() is Code.INTERNAL
    for shown in (error.details(), error.debug_error_string(), str(error.trailing_metadata())):
        assert "secret" not in (shown or "")
        assert "Traceback" not in (shown or "")
        assert "KeyError" not in (shown or "")
    logged = [record for record in caplog.records if record.exc_info]
    assert len(logged) == 1
    assert logged[0].levelno == logging.ERROR
    assert "a secret of the server" in caplog.text


@pytest.mark.parametrize("kind", CALLS)
async def test_trailers_travel_with_the_status(bench: Bench, kind: str) -> None:
    error = await failure(CALLS[kind](await serve(bench, Servicer(ConstraintFailed("broken")))))
    assert error.code() is Code.FAILED_PRECONDITION
    assert ("smg-constraint-failed", "engine") in list(error.trailing_metadata() or ())


async def test_what_was_streamed_before_an_error_arrives(bench: Bench) -> None:
    stub = await serve(bench, Servicer(Overloaded("full")))
    for call in (
        stub.Generate(pb.GenerateRequest()),
        stub.GetTokenizer(common_pb2.GetTokenizerRequest()),
    ):
        assert await call.read() is not grpc.aio.EOF
        assert (await failure(call.read())).code() is Code.RESOURCE_EXHAUSTED


async def test_a_handlers_own_abort_passes_untouched(bench: Bench) -> None:
    error = await failure((await serve(bench, Servicer())).Abort(pb.AbortRequest()))
    assert (error.code(), error.details()) == (Code.ABORTED, "by its own hand")


async def test_an_inner_cancellation_gives_the_client_a_status(bench: Bench) -> None:
    error = await failure((await serve(bench, Servicer())).GetServerInfo(pb.GetServerInfoRequest()))
    assert error.code() is Code.UNAVAILABLE


@pytest.mark.parametrize(
    ("method", "streams"),
    [("GetModelInfo", False), ("Abort", False), ("Generate", True)],
)
async def test_bytes_that_are_no_message_are_the_callers_fault(
    bench: Bench, method: str, streams: bool
) -> None:
    servicer = Servicer()
    await serve(bench, servicer)
    channel = bench.channel()
    path = f"/{SERVICE}/{method}"
    call = channel.unary_stream(path) if streams else channel.unary_unary(path)
    error = await failure(read(call(b"\xff\xff")) if streams else call(b"\xff\xff"))
    assert error.code() is Code.INVALID_ARGUMENT
    assert "does not parse" in (error.details() or "")
    assert not servicer.entered.is_set()


async def test_a_method_that_is_not_here_is_unimplemented(bench: Bench) -> None:
    await serve(bench, Servicer())
    call = bench.channel().unary_unary("/no.Such/Method")
    assert (await failure(call(b""))).code() is Code.UNIMPLEMENTED


@pytest.mark.parametrize("how", ["cancel", "deadline"])
@pytest.mark.parametrize("kind", ["stream", "generator"])
async def test_a_client_that_leaves_ends_its_handler_and_is_no_refusal(
    bench: Bench, kind: str, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    servicer = Servicer()
    stub = await serve(bench, servicer)
    timeout = 0.3 if how == "deadline" else None
    call = (
        stub.Generate(pb.GenerateRequest(stream=True), timeout=timeout)
        if kind == "stream"
        else stub.GetTokenizer(common_pb2.GetTokenizerRequest(), timeout=timeout)
    )
    assert await call.read() is not grpc.aio.EOF
    # The generator is stopped in the middle of a write, for nobody reads on.
    await asyncio.sleep(0.05)
    if how == "cancel":
        call.cancel()
    await asyncio.wait_for(servicer.closed.wait(), 5)
    assert await call.code() is (Code.CANCELLED if how == "cancel" else Code.DEADLINE_EXCEEDED)
    await asyncio.sleep(0.05)
    assert next(iter(bench.metrics.refusals.collect())).samples == []
    assert [record for record in caplog.records if record.levelno > logging.INFO] == []


async def test_a_thousand_calls_leave_no_task_behind(bench: Bench) -> None:
    stub = await serve(bench, Servicer(Overloaded("full")))
    await failure(CALLS["unary"](stub))
    before = len(asyncio.all_tasks())
    for _ in range(100):
        calls = [CALLS[kind](stub) for kind in CALLS for _ in range(3)]
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert {type(result) for result in results} == {grpc.aio.AioRpcError}
    await asyncio.sleep(0.1)
    gc.collect()
    assert len(asyncio.all_tasks()) <= before


# Authentication.


@pytest.mark.parametrize(
    "metadata",
    [
        (),
        (("authorization", ""),),
        (("authorization", KEY),),
        (("authorization", "Bearer"),),
        (("authorization", f"Bearer {KEY[:-1]}"),),
        (("authorization", f"Bearer {KEY}x"),),
        (("authorization", f"Basic {KEY}"),),
        (("authorization", "Bearer "),),
        (("x-api-key", KEY),),
    ],
)
@pytest.mark.parametrize("kind", CALLS)
async def test_a_call_without_the_key_is_refused(
    bench: Bench, kind: str, metadata: tuple[tuple[str, str], ...]
) -> None:
    servicer = Servicer()
    stub = await serve(bench, servicer, api_key=KEY)
    call = {
        "unary": lambda: stub.GetModelInfo(pb.GetModelInfoRequest(), metadata=metadata),
        "stream": lambda: read(stub.Generate(pb.GenerateRequest(), metadata=metadata)),
        "generator": lambda: read(
            stub.GetTokenizer(common_pb2.GetTokenizerRequest(), metadata=metadata)
        ),
    }[kind]
    error = await failure(call())
    assert error.code() is Code.UNAUTHENTICATED
    assert KEY not in (error.details() or "")
    assert not servicer.entered.is_set()
    await bench.counted("refusals_total", 1, code="UNAUTHENTICATED")


async def test_a_call_with_the_key_is_served(bench: Bench) -> None:
    stub = await serve(bench, Servicer(), api_key=KEY)
    metadata = (("authorization", f"Bearer {KEY}"),)
    response = await stub.GetModelInfo(pb.GetModelInfoRequest(), metadata=metadata)
    assert response.vocab_size == 1


async def test_each_of_several_keys_is_served_and_every_one_is_compared(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    guard = interceptors.Guard(metrics=bench.metrics, api_keys=["one", "two"])
    compared: list[bytes] = []

    class Spy:
        @staticmethod
        def compare_digest(given: bytes, expected: bytes) -> bool:
            compared.append(expected)
            return hmac.compare_digest(given, expected)

    monkeypatch.setattr(interceptors, "hmac", Spy)
    for key in ("one", "two"):
        guard._authenticate("/a/B", {"authorization": f"Bearer {key}"})
    assert compared == [b"Bearer one", b"Bearer two"] * 2
    with pytest.raises(Unauthenticated):
        guard._authenticate("/a/B", {"authorization": "Bearer three"})


async def test_methods_that_are_guarded_already_get_the_check_of_their_bytes_alone(
    bench: Bench,
) -> None:
    servicer = Servicer()
    guard = interceptors.Guard(metrics=bench.metrics, api_keys=[KEY])
    interceptor = interceptors.GuardInterceptor(guard, guarded_services=[SERVICE])
    server = grpc.aio.server(interceptors=[interceptor])
    servicer.Generate = guard.wrap(  # type: ignore[method-assign]
        f"/{SERVICE}/Generate", servicer.Generate, streams=True
    )
    mlx_engine_pb2_grpc.add_MlxEngineServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = channel.unary_unary(f"/{SERVICE}/Generate")
        error = await failure(call(b"\xff", metadata=(("authorization", f"Bearer {KEY}"),)))
        assert error.code() is Code.INVALID_ARGUMENT
        # One guard, one refusal.
        await bench.counted("refusals_total", 1, code="INVALID_ARGUMENT")
        assert bench.sample("refusals_total", code="INVALID_ARGUMENT") == 1
        assert (await failure(call(b""))).code() is Code.UNAUTHENTICATED
    await server.stop(None)


async def test_keys_are_compared_in_constant_time(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[tuple[bytes, bytes]] = []

    class Spy:
        @staticmethod
        def compare_digest(given: bytes, expected: bytes) -> bool:
            compared.append((given, expected))
            return hmac.compare_digest(given, expected)

    monkeypatch.setattr(interceptors, "hmac", Spy)
    stub = await serve(bench, Servicer(), api_key=KEY)
    await failure(CALLS["unary"](stub))
    assert compared == [(b"", f"Bearer {KEY}".encode())]


async def test_probes_need_no_key(bench: Bench) -> None:
    await serve(bench, Servicer(), api_key=KEY)
    stub = health_pb2_grpc.HealthStub(bench.channel())
    assert (await stub.Check(health_pb2.HealthCheckRequest())).status == 2
    watch = stub.Watch(health_pb2.HealthCheckRequest(service=SERVICE))
    assert (await watch.read()).status == 2
    watch.cancel()


async def test_a_probe_that_names_nothing_is_no_refusal_of_the_worker(bench: Bench) -> None:
    stub = health_pb2_grpc.HealthStub(await bench.serve())
    error = await failure(stub.Check(health_pb2.HealthCheckRequest(service="no.Such")))
    assert error.code() is Code.NOT_FOUND
    await asyncio.sleep(0.05)
    assert next(iter(bench.metrics.refusals.collect())).samples == []


def _list_services() -> list[Any]:
    return [reflection_pb2.ServerReflectionRequest(list_services="")]


async def test_reflection_needs_the_key_as_everything_else(bench: Bench) -> None:
    await serve(bench, Servicer(), api_key=KEY)
    stub = reflection_pb2_grpc.ServerReflectionStub(bench.channel())
    error = await failure(read(stub.ServerReflectionInfo(iter(_list_services()))))
    assert error.code() is Code.UNAUTHENTICATED
    metadata = (("authorization", f"Bearer {KEY}"),)
    (answer,) = await read(stub.ServerReflectionInfo(iter(_list_services()), metadata=metadata))
    names = {service.name for service in answer.list_services_response.service}
    assert {SERVICE, "grpc.health.v1.Health"} < names


async def test_reflection_refuses_what_does_not_parse_without_a_traceback_in_the_log(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    await serve(bench, Servicer())
    call = bench.channel().stream_stream(
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
    )
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call(iter([b"\xff" * 10])).read()
    assert caught.value.code() is Code.INVALID_ARGUMENT
    assert "does not parse" in (caught.value.details() or "")
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


async def test_reflection_can_be_turned_off(bench: Bench) -> None:
    await serve(bench, Servicer(), reflection=False)
    stub = reflection_pb2_grpc.ServerReflectionStub(bench.channel())
    error = await failure(read(stub.ServerReflectionInfo(iter(_list_services()))))
    assert error.code() is Code.UNIMPLEMENTED


# Trace context.

_exporter = InMemorySpanExporter()


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(_exporter))
    # The global provider can be set once a process; what reads it is redirected instead.
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    _exporter.clear()
    return _exporter


TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = (("traceparent", f"00-{TRACE}-{PARENT}-01"),)


async def span(exporter: InMemorySpanExporter) -> Any:
    for _ in range(100):
        if exporter.get_finished_spans():
            break
        await asyncio.sleep(0.01)
    (only,) = exporter.get_finished_spans()
    return only


async def test_a_span_is_the_child_of_the_callers(
    bench: Bench, exporter: InMemorySpanExporter
) -> None:
    stub = await serve(bench, Servicer())
    await stub.GetModelInfo(pb.GetModelInfoRequest(), metadata=TRACEPARENT)
    found = await span(exporter)
    assert found.name == f"{SERVICE}/GetModelInfo"
    assert found.kind is trace.SpanKind.SERVER
    assert format(found.context.trace_id, "032x") == TRACE
    assert format(found.parent.span_id, "016x") == PARENT
    assert found.status.status_code is trace.StatusCode.UNSET


async def test_a_stream_has_one_span_for_its_whole_life(
    bench: Bench, exporter: InMemorySpanExporter
) -> None:
    stub = await serve(bench, Servicer())
    await read(stub.Generate(pb.GenerateRequest(), metadata=TRACEPARENT))
    assert format((await span(exporter)).parent.span_id, "016x") == PARENT


@pytest.mark.parametrize("traceparent", [None, "nonsense", f"00-{'0' * 32}-{PARENT}-01"])
async def test_a_call_without_a_usable_context_begins_a_trace(
    bench: Bench, exporter: InMemorySpanExporter, traceparent: str | None
) -> None:
    metadata = (("traceparent", traceparent),) if traceparent else ()
    stub = await serve(bench, Servicer())
    await stub.GetModelInfo(pb.GetModelInfoRequest(), metadata=metadata)
    assert (await span(exporter)).parent is None


@pytest.mark.parametrize("kind", CALLS)
async def test_a_failed_call_says_why_in_its_span(
    bench: Bench, exporter: InMemorySpanExporter, kind: str
) -> None:
    await failure(CALLS[kind](await serve(bench, Servicer(Overloaded("the queue is full")))))
    status = (await span(exporter)).status
    assert status.status_code is trace.StatusCode.ERROR
    assert status.description == "the queue is full"

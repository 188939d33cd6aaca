from __future__ import annotations

import asyncio
import signal
import sys
import time
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from smg_grpc_proto.generated import mlx_engine_pb2 as pb
from smg_grpc_proto.generated import mlx_engine_pb2_grpc
from tests.support.processes import FAKE, Process, free_port, scrape

Code = grpc.StatusCode
SERVING, NOT_SERVING = 1, 2


def stubs(channel: grpc.aio.Channel) -> tuple[Any, Any]:
    return mlx_engine_pb2_grpc.MlxEngineStub(channel), health_pb2_grpc.HealthStub(channel)


def request(max_tokens: int, **fields: Any) -> pb.GenerateRequest:
    if "text" not in fields:
        fields["tokenized"] = pb.TokenizedInput(input_ids=[1, 2, 3])
    params = pb.SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    return pb.GenerateRequest(sampling_params=params, stream=True, **fields)


async def read(call: Any) -> list[Any]:
    messages = []
    while (message := await call.read()) is not grpc.aio.EOF:
        messages.append(message)
    return messages


async def code_of(call: Any) -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await asyncio.wait_for(read(call), 20)
    code: grpc.StatusCode = caught.value.code()
    return code


# Starting.


def test_a_setting_that_is_not_allowed_exits_2_with_one_line() -> None:
    with Process("--drain-timeout", "-1") as worker:
        assert worker.wait() == 2
        (line,) = worker.output.splitlines()
        assert line.startswith("error: --drain-timeout is '-1'")


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("start-refused", "no such model: fake"),
        ("start-crash", "ZeroDivisionError: a bug while loading"),
        ("start-dead", "the engine died while it warmed up"),
    ],
)
def test_a_start_that_fails_exits_3_and_says_why_at_the_end(fault: str, words: str) -> None:
    with Process("--fault", fault) as worker:
        assert worker.wait() == 3
        last = worker.output.splitlines()[-1]
        assert last.startswith("error: ")
        assert words in last
        # A traceback is for bugs alone.
        assert ("Traceback" in worker.output) == (fault == "start-crash")


def test_a_second_server_on_a_port_refuses_to_start_and_harms_nobody() -> None:
    with Process() as first:
        first.until_serving()
        with Process(port=first.port) as second:
            assert second.wait() == 3
            assert f"127.0.0.1:{first.port}" in second.output.splitlines()[-1]
        first.until_serving()


def test_a_metrics_port_in_use_exits_3_and_names_the_flag() -> None:
    with Process() as first:
        first.until_serving()
        with Process("--metrics-port", str(first.port)) as second:
            assert second.wait() == 3
            assert f"--metrics-port {first.port}" in second.output.splitlines()[-1]


@pytest.mark.parametrize("content", ["", "no certificate"])
def test_tls_files_that_are_none_exit_3(content: str, tmp_path: Path) -> None:
    for name in ("cert.pem", "key.pem"):
        (tmp_path / name).write_text(content)
    with Process(
        "--ssl-certfile", str(tmp_path / "cert.pem"), "--ssl-keyfile", str(tmp_path / "key.pem")
    ) as worker:
        assert worker.wait() == 3
        assert worker.output.splitlines()[-1].startswith("error: ")


async def test_a_request_during_warm_up_is_refused_at_once_and_watch_shows_the_way() -> None:
    with Process("--warm-seconds", "1.5") as worker:
        worker.until_logged("worker is warming")
        async with grpc.aio.insecure_channel(worker.address) as channel:
            engine, health = stubs(channel)
            watch = health.Watch(health_pb2.HealthCheckRequest())
            assert (await asyncio.wait_for(watch.read(), 5)).status == NOT_SERVING
            assert await code_of(engine.Generate(request(1))) is Code.UNAVAILABLE
            assert (await asyncio.wait_for(watch.read(), 20)).status == SERVING
            assert len(await read(engine.Generate(request(1)))) > 0
            watch.cancel()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_during_warm_up_exits_0_promptly(number: signal.Signals) -> None:
    with Process("--warm-seconds", "60") as worker:
        worker.until_logged("worker is warming").signal(number)
        assert worker.wait(5) == 0


def test_a_signal_while_a_thread_loads_the_model_exits_0_promptly() -> None:
    with Process("--fault", "start-busy-thread") as worker:
        with grpc.insecure_channel(worker.address) as channel:
            grpc.channel_ready_future(channel).result(20)
        worker.signal()
        assert worker.wait(5) == 0


# Draining.


async def test_sigterm_is_seen_at_once_and_running_streams_end_whole() -> None:
    with Process("--step-seconds", "0.01") as worker:
        worker.until_serving()
        async with grpc.aio.insecure_channel(worker.address) as channel:
            engine, health = stubs(channel)
            watch = health.Watch(health_pb2.HealthCheckRequest())
            assert (await watch.read()).status == SERVING
            stream = engine.Generate(request(150))
            assert await stream.read() is not grpc.aio.EOF
            worker.signal()
            began = time.monotonic()
            assert (await asyncio.wait_for(watch.read(), 1)).status == NOT_SERVING
            assert time.monotonic() - began < 1
            # What is new is refused while what runs goes on.
            assert await code_of(engine.Generate(request(1))) is Code.UNAVAILABLE
            messages = await read(stream)
            assert messages[-1].complete.finish_reason == "length"
            assert messages[-1].complete.completion_tokens == 150
            watch.cancel()
        assert worker.wait(10) == 0


async def test_when_the_drain_timeout_is_over_streams_get_unavailable() -> None:
    with Process("--step-seconds", "0.01", "--drain-timeout", "0.3") as worker:
        worker.until_serving()
        async with grpc.aio.insecure_channel(worker.address) as channel:
            streams = [stubs(channel)[0].Generate(request(4000)) for _ in range(3)]
            for stream in streams:
                await stream.read()
            worker.signal()
            codes = await asyncio.gather(*map(code_of, streams))
        assert codes == [Code.UNAVAILABLE] * 3
        assert worker.wait(10) == 0
        assert "drain timeout is over: ending 3 requests" in worker.output


async def test_an_idle_worker_exits_at_once_whoever_watches() -> None:
    with Process() as worker:
        worker.until_serving()
        async with grpc.aio.insecure_channel(worker.address) as channel:
            watch = stubs(channel)[1].Watch(health_pb2.HealthCheckRequest())
            await watch.read()
            worker.signal()
            assert await asyncio.to_thread(worker.wait, 5) == 0
            watch.cancel()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
async def test_a_second_signal_forces_the_end(number: signal.Signals, code: int) -> None:
    with Process() as worker:
        worker.until_serving()
        async with grpc.aio.insecure_channel(worker.address) as channel:
            engine, _ = stubs(channel)
            call = asyncio.ensure_future(read(engine.Generate(request(1, text="silent"))))
            await _until_active(engine, 1)
            worker.signal(number)
            worker.until_logged("draining 1 requests")
            worker.signal(number)
            assert await asyncio.to_thread(worker.wait, 5) == code
            with pytest.raises(grpc.aio.AioRpcError):
                await call


async def _until_active(engine: Any, count: int) -> None:
    for _ in range(200):
        info = await engine.GetServerInfo(pb.GetServerInfoRequest())
        if info.active_requests == count:
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"{info.active_requests} active requests, not {count}")


@pytest.mark.parametrize("fault", ["close-never", "close-crash"])
def test_an_engine_that_does_not_close_does_not_hold_the_exit(fault: str) -> None:
    with Process("--fault", fault) as worker:
        worker.until_serving().signal()
        assert worker.wait(5) == 0
        assert "the engine did not stop" in worker.output


# Dying.


async def test_when_the_engine_dies_all_get_unavailable_and_the_process_exits_1() -> None:
    with Process("--step-seconds", "0.01") as worker:
        worker.until_serving()
        async with grpc.aio.insecure_channel(worker.address) as channel:
            engine, health = stubs(channel)
            watch = health.Watch(health_pb2.HealthCheckRequest())
            assert (await watch.read()).status == SERVING
            streams = [engine.Generate(request(4000)) for _ in range(2)]
            streams.append(engine.Generate(request(1, text="silent")))
            await _until_active(engine, 3)
            streams.append(engine.Generate(request(1, text="die")))
            codes = await asyncio.gather(*map(code_of, streams))
            assert codes == [Code.UNAVAILABLE] * 4
            for stream in streams:
                assert await stream.details() == "the fake engine was told to die"
            assert (await asyncio.wait_for(watch.read(), 2)).status == NOT_SERVING
            watch.cancel()
        assert worker.wait(10) == 1
        assert "the fake engine was told to die" in worker.output
        assert "worker is dead (was serving)" in worker.output


def test_an_engine_that_dies_while_idle_ends_the_process_too() -> None:
    with Process("--die-after", "0.1") as worker:
        assert worker.wait() == 1


async def test_an_engine_that_dies_while_draining_exits_1() -> None:
    with Process() as worker:
        worker.until_serving()
        async with grpc.aio.insecure_channel(worker.address) as channel:
            engine, _ = stubs(channel)
            stream = engine.Generate(request(1, text="die-soon"))
            await _until_active(engine, 1)
            worker.signal()
            worker.until_logged("draining 1 requests")
            assert await code_of(stream) is Code.UNAVAILABLE
            assert await stream.details() == "the fake engine was told to die"
        assert worker.wait(10) == 1
        assert "worker is dead (was draining)" in worker.output


# While it lives.


async def test_a_bug_in_a_handler_costs_one_request_and_not_the_worker() -> None:
    with Process() as worker:
        worker.until_serving()
        async with grpc.aio.insecure_channel(worker.address) as channel:
            engine, _ = stubs(channel)
            assert await code_of(engine.Generate(request(1, text="crash"))) is Code.INTERNAL
            assert len(await read(engine.Generate(request(3)))) > 0
        worker.signal()
        assert worker.wait(10) == 0
        assert "a secret of the server" in worker.output


@pytest.mark.parametrize(
    ("engine_code", "code"),
    [
        ("400", Code.INVALID_ARGUMENT),
        ("404", Code.NOT_FOUND),
        ("429", Code.RESOURCE_EXHAUSTED),
        ("503", Code.UNAVAILABLE),
        ("504", Code.DEADLINE_EXCEEDED),
        ("500", Code.INTERNAL),
    ],
)
async def test_what_the_engine_refuses_is_a_status_and_never_a_completion(
    engine_code: str, code: grpc.StatusCode, shared: Process
) -> None:
    async with grpc.aio.insecure_channel(shared.address) as channel:
        assert await code_of(stubs(channel)[0].Generate(request(1, text=engine_code))) is code


@pytest.fixture(scope="module")
def shared() -> Any:
    with Process() as worker:
        worker.until_serving()
        yield worker


async def test_the_metrics_port_shows_every_family_with_its_values() -> None:
    port = free_port()
    with Process("--metrics-port", str(port)) as worker:
        worker.until_serving()
        async with grpc.aio.insecure_channel(worker.address) as channel:
            engine, _ = stubs(channel)
            await read(engine.Generate(request(3)))
            await code_of(engine.Generate(request(1, text="429")))
            text = ""
            for _ in range(100):
                text = await asyncio.to_thread(scrape, port)
                # A refusal is counted when its status is out: the client may be faster.
                if "RESOURCE_EXHAUSTED" in text:
                    break
        lines = set(text.splitlines())
        assert 'smg_worker_info{engine="fake",model_name="fake-model"} 1.0' in lines
        assert 'smg_worker_state{state="serving"} 1.0' in lines
        assert 'smg_worker_state{state="draining"} 0.0' in lines
        assert 'smg_worker_requests_total{finish_reason="length"} 1.0' in lines
        assert 'smg_worker_requests_total{finish_reason="error"} 1.0' in lines
        assert 'smg_worker_refusals_total{code="RESOURCE_EXHAUSTED"} 1.0' in lines
        assert "smg_worker_requests_in_flight 0.0" in lines
        assert "smg_worker_prompt_tokens_total 3.0" in lines
        assert "smg_worker_cached_tokens_total 0.0" in lines
        assert "smg_worker_generation_tokens_total 3.0" in lines
        assert "smg_worker_time_to_first_token_seconds_count 1.0" in lines
        assert "smg_worker_inter_token_latency_seconds_count 2.0" in lines
        assert "smg_worker_request_duration_seconds_count 2.0" in lines
        worker.signal()
        assert worker.wait(10) == 0


def test_log_lines_are_json_where_that_is_asked_for() -> None:
    import json

    with Process("--log-format", "json") as worker:
        worker.until_serving().signal()
        assert worker.wait(10) == 0
        records = [json.loads(line) for line in worker.output.splitlines()]
        assert {"time", "level", "logger", "message"} <= records[0].keys()


# Spans.


async def test_spans_reach_a_collector_with_the_callers_trace() -> None:
    exported: asyncio.Queue[bytes] = asyncio.Queue()

    async def export(request: bytes, context: Any) -> bytes:
        del context
        exported.put_nowait(request)
        return b""

    collector = grpc.aio.server()
    handlers = {"Export": grpc.unary_unary_rpc_method_handler(export)}
    service = "opentelemetry.proto.collector.trace.v1.TraceService"
    collector.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
    port = collector.add_insecure_port("127.0.0.1:0")
    await collector.start()
    trace = "0af7651916cd43dd8448eb211c80319c"
    with Process("--otlp-traces-endpoint", f"http://127.0.0.1:{port}") as worker:
        await asyncio.to_thread(worker.until_serving)
        async with grpc.aio.insecure_channel(worker.address) as channel:
            metadata = (("traceparent", f"00-{trace}-b7ad6b7169203331-01"),)
            await read(stubs(channel)[0].Generate(request(2), metadata=metadata))
            # Exported with the end at the latest.
            worker.signal()
            assert await asyncio.to_thread(worker.wait, 10) == 0
    batches = [exported.get_nowait() for _ in range(exported.qsize())]
    await collector.stop(None)
    assert any(bytes.fromhex(trace) in batch for batch in batches)
    assert any(b"smg-fake" in batch for batch in batches)


def test_a_collector_that_is_away_does_not_hold_the_exit() -> None:
    with Process("--otlp-traces-endpoint", f"http://127.0.0.1:{free_port()}") as worker:
        worker.until_serving().signal()
        assert worker.wait(5) == 0


# What a supervisor leaves open.


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_worker_whose_standard_streams_are_closed_serves_and_ends_in_order(closed: str) -> None:
    command = ["sh", "-c", f'exec "$@" {closed}', "sh", *FAKE]
    with Process(command=command) as worker:
        worker.until_serving()
        if sys.platform == "linux":
            for number in range(3):
                opened = Path(f"/proc/{worker.process.pid}/fd/{number}").readlink()
                assert opened.is_absolute(), f"{number} is {opened}"
        worker.signal()
        assert worker.wait() == 0

"""A worker's life under vLLM's launchers and ours, as its clients and its supervisor see it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from smg_grpc_proto.generated import vllm_engine_pb2 as pb
from smg_grpc_proto.generated import vllm_engine_pb2_grpc
from tests.conformance.reading import eventually, failure
from tests.support.processes import free_port, scrape
from tests.support.vllm_launch import (
    BOOT_SECONDS,
    EAGER,
    ENVIRONMENT,
    LAUNCHERS,
    descendants,
    entry_points,
    gone,
    model_directory,
    start,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.processes import Process

pytestmark = pytest.mark.engine

Code = grpc.StatusCode
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVICE = "vllm.grpc.engine.VllmEngine"
KEY = "a-key"
BEARER = (("authorization", f"Bearer {KEY}"),)
VLLM_SERVE, VLLM_MODULE, OURS = LAUNCHERS


@pytest.fixture(scope="session")
def tiny() -> str:
    return model_directory("tiny-llama")


@pytest.fixture(scope="session")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return entry_points(tmp_path_factory.mktemp("path"))


class Launched:
    def __init__(self, worker: Process, metrics_port: int) -> None:
        self.worker = worker
        self.metrics_port = metrics_port


@pytest.fixture(scope="module")
def launched(tiny: str, path: str) -> Iterator[Launched]:
    """`vllm serve --grpc` with all that variables can ask of it."""
    port = free_port()
    env = {"SMG_API_KEY": KEY, "SMG_METRICS_PORT": str(port)}
    with start(VLLM_SERVE, tiny, path, *EAGER, env=env) as worker:
        worker.until_serving(BOOT_SECONDS)
        yield Launched(worker, port)
        worker.signal()
        assert worker.wait(30) == 0


def request(max_tokens: int = 4, *, stream: bool = True) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        tokenized=pb.TokenizedInput(input_ids=range(100, 140)),
        sampling_params=pb.SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True),
        stream=stream,
    )


async def read(call: Any) -> pb.GenerateComplete:
    """Read a stream to its end, some of which may have been read before."""
    end = None
    while (message := await call.read()) is not grpc.aio.EOF:
        if message.WhichOneof("response") == "complete":
            end = message.complete
    assert end is not None, "a stream without an end"
    return end


async def test_only_the_bearer_of_the_key_is_served_and_probes_need_none(
    launched: Launched,
) -> None:
    async with grpc.aio.insecure_channel(launched.worker.address) as channel:
        stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)
        for metadata in ((), (("authorization", "Bearer another"),)):
            for call in (
                read(stub.Generate(request(), metadata=metadata)),
                stub.GetModelInfo(pb.GetModelInfoRequest(), metadata=metadata),
            ):
                assert (await failure(call)).code() is Code.UNAUTHENTICATED
        assert (await read(stub.Generate(request(), metadata=BEARER))).completion_tokens
        probe = health_pb2_grpc.HealthStub(channel)
        assert (await probe.Check(health_pb2.HealthCheckRequest())).status == SERVING
        # vLLM adds reflection by itself, after the servicer: the key holds there too.
        mirror = reflection_pb2_grpc.ServerReflectionStub(channel)
        ask = reflection_pb2.ServerReflectionRequest(list_services="")
        answers = mirror.ServerReflectionInfo(iter([ask]))
        assert (await failure(answers.read())).code() is Code.UNAUTHENTICATED


async def test_health_knows_its_services_and_no_others(launched: Launched) -> None:
    async with grpc.aio.insecure_channel(launched.worker.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for service in ("", SERVICE):
            found = await stub.Check(health_pb2.HealthCheckRequest(service=service))
            assert found.status == SERVING
        error = await failure(stub.Check(health_pb2.HealthCheckRequest(service="no.Such")))
        assert error.code() is Code.NOT_FOUND


@pytest.mark.parametrize("method", ["Generate", "GetModelInfo"])
async def test_bytes_that_are_no_message_are_the_callers_fault(
    launched: Launched, method: str
) -> None:
    async with grpc.aio.insecure_channel(launched.worker.address) as channel:
        call = channel.unary_unary(f"/{SERVICE}/{method}")
        error = await failure(call(b"\xff\xff\xff", metadata=BEARER))
        assert error.code() is Code.INVALID_ARGUMENT


def test_the_metrics_port_shows_the_workers_families_and_vllms(launched: Launched) -> None:
    text = scrape(launched.metrics_port)
    assert 'smg_worker_state{state="serving"} 1.0' in text
    assert "vllm:num_requests_running" in text


def test_what_listens_beside_the_grpc_port_listens_on_loopback(launched: Launched) -> None:
    import psutil

    worker = launched.worker.process.pid
    listening = [
        connection.laddr.ip
        for process in (worker, *descendants(worker))
        for connection in psutil.Process(process).net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert len(listening) >= 2, "the gRPC port and the metrics port"
    assert {address.removeprefix("::ffff:") for address in listening} <= {"127.0.0.1", "::1"}
    assert "KV events are published at ipc://" in launched.worker.output


def test_a_second_server_on_the_port_refuses_before_it_loads_a_model(
    launched: Launched, tiny: str, path: str
) -> None:
    with start(VLLM_SERVE, tiny, path, *EAGER, port=launched.worker.port) as second:
        assert second.wait(BOOT_SECONDS) == 3
        assert f"127.0.0.1:{launched.worker.port}" in second.output.splitlines()[-1]
        assert "Starting to load model" not in second.output


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [VLLM_SERVE, VLLM_MODULE])
async def test_sigterm_shows_at_once_and_running_streams_are_told(
    launcher: str, tiny: str, path: str
) -> None:
    with start(launcher, tiny, path, *EAGER) as worker:
        worker.until_serving(BOOT_SECONDS)
        async with grpc.aio.insecure_channel(worker.address) as channel:
            stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)
            watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
            assert (await watch.read()).status == SERVING
            short, long = stub.Generate(request(16)), stub.Generate(request(2000))
            for call in (short, long):
                await call.read()
            worker.signal()
            began = time.monotonic()
            assert (await asyncio.wait_for(watch.read(), 2)).status == NOT_SERVING
            late = await failure(read(stub.Generate(request())))
            assert late.code() is Code.UNAVAILABLE
            assert (await read(short)).finish_reason == "length"
            error = await failure(read(long))
            assert error.code() is Code.UNAVAILABLE
            assert "shut down" in (error.details() or "")
            assert time.monotonic() - began < 6
        assert await asyncio.to_thread(worker.wait, 30) == 0


@pytest.mark.parametrize(
    "launcher",
    [VLLM_SERVE, pytest.param(VLLM_MODULE, marks=pytest.mark.slow), OURS],
)
async def test_an_engine_core_that_is_killed_fails_all_and_ends_the_process(
    launcher: str, tiny: str, path: str, tmp_path: Path
) -> None:
    # Short, or the sockets of the KV events would lie elsewhere.
    with (
        contextlib.ExitStack() as owned,
        start(launcher, tiny, path, *EAGER, env={"TMPDIR": str(tmp_path)}) as worker,
    ):
        worker.until_serving(BOOT_SECONDS)
        async with grpc.aio.insecure_channel(worker.address) as channel:
            stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)
            watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
            assert (await watch.read()).status == SERVING
            streams = [stub.Generate(request(2000)) for _ in range(3)]
            for stream in streams:
                await stream.read()
            unary = asyncio.ensure_future(failure(read(stub.Generate(request(2000, stream=False)))))

            async def all_active() -> bool:
                answer = await stub.GetServerInfo(pb.GetServerInfoRequest())
                return bool(answer.active_requests == 4)

            await eventually(all_active, 10, "four requests active")
            below = descendants(worker.process.pid)
            core = next(pid for pid, title in below.items() if "EngineCore" in title)
            owned.callback(_end, list(below))
            os.kill(core, signal.SIGKILL)
            began = time.monotonic()
            for stream in streams:
                error = await asyncio.wait_for(failure(read(stream)), 5)
                assert error.code() is Code.UNAVAILABLE
            assert (await asyncio.wait_for(unary, 5)).code() is Code.UNAVAILABLE
            assert (await asyncio.wait_for(watch.read(), 5)).status == NOT_SERVING
        assert await asyncio.to_thread(worker.wait, 10) == 1
        print(f"{launcher}: ended {time.monotonic() - began:.2f} s after its engine core")
        assert await asyncio.to_thread(gone, list(below), 10), "a process of the engine lives on"
        assert not _left(tmp_path)


def _left(directory: Path) -> list[Path]:
    return list(directory.glob("smg-vllm-*"))


def _end(processes: list[int]) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


@pytest.mark.parametrize(
    ("launcher", "options", "code", "words"),
    [
        pytest.param(VLLM_SERVE, ("--ssl-certfile", "/no/such"), 2, "--ssl-certfile", id="tls"),
        pytest.param(
            VLLM_SERVE, ("--api-key", "two words"), 2, "--api-key", id="key", marks=pytest.mark.slow
        ),
        pytest.param(OURS, ("--max-num-seqs", "many"), 2, "--max-num-seqs", id="vllm's value"),
        pytest.param(OURS, ("--model", "/no/such/model"), 3, "/no/such/model", id="model"),
    ],
)
def test_what_cannot_be_served_as_asked_ends_the_start_with_one_line(
    launcher: str, options: tuple[str, ...], code: int, words: str, tiny: str, path: str
) -> None:
    model = "" if "--model" in options else tiny
    command = list(filter(None, (word.format(model=model) for word in LAUNCHERS[launcher])))
    completed = subprocess.run(
        [*command, *options],
        env={**_clean(), **ENVIRONMENT, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=BOOT_SECONDS,
    )
    assert completed.returncode == code, completed.stderr
    last = completed.stderr.splitlines()[-1]
    assert last.startswith("error: ")
    assert words in last


def test_help_shows_our_flags_and_then_vllms(path: str) -> None:
    completed = subprocess.run(
        [sys.executable, "-m", "smg_grpc_servicer.vllm", "--help"],
        env={**_clean(), **ENVIRONMENT, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=BOOT_SECONDS,
    )
    assert completed.returncode == 0, completed.stderr
    ours, theirs = completed.stdout.split("All other flags are vLLM's")
    assert "--drain-timeout" in ours
    assert "ModelConfig" in theirs


def _clean() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("SMG_")}

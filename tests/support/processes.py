"""A worker as a process of its own, for tests of its life and of its exit code."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import TracebackType

    from typing_extensions import Self

ROOT = Path(__file__).parents[2]
FAKE = [sys.executable, "-m", "tests.support.fake_worker"]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def scrape(port: int) -> str:
    """Return the text of a metrics port."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as response:
        text: str = response.read().decode()
        return text


class Process:
    """A worker process; leaving the block ends it, whatever state it is in."""

    def __init__(
        self,
        *options: str,
        command: Sequence[str] = FAKE,
        env: Mapping[str, str] | None = None,
        port: int | None = None,
    ) -> None:
        self.port = free_port() if port is None else port
        self.address = f"127.0.0.1:{self.port}"
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  (closed by __exit__)
        clean = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("SMG_", "OTEL_", "MLX_"))
        }
        self.process = subprocess.Popen(
            [*command, "--port", str(self.port), *options],
            env={**clean, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", **(env or {})},
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    @property
    def output(self) -> str:
        self._log.seek(0)
        return self._log.read()

    def signal(self, number: signal.Signals = signal.SIGTERM) -> None:
        self.process.send_signal(number)

    def wait(self, seconds: float = 30) -> int:
        """Return the exit code; fails with the log when the process lives on."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still alive after {seconds} s:\n{self.output}") from None

    def until_serving(self, seconds: float = 30) -> Self:
        deadline = time.monotonic() + seconds
        with grpc.insecure_channel(self.address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            while time.monotonic() < deadline:
                if self.process.poll() is not None:
                    break
                try:
                    answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=1)
                except grpc.RpcError:
                    pass
                else:
                    if answer.status == health_pb2.HealthCheckResponse.SERVING:
                        return self
                time.sleep(0.05)
        state = "not serving in time" if self.process.poll() is None else "ended"
        raise AssertionError(f"{state} ({seconds:g} s were allowed):\n{self.output}")

    def until_logged(self, words: str, seconds: float = 30) -> Self:
        deadline = time.monotonic() + seconds
        while words not in self.output:
            if time.monotonic() > deadline or self.process.poll() is not None:
                raise AssertionError(f"{words!r} was not logged:\n{self.output}")
            time.sleep(0.02)
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # The whole group: the engine's own processes outlive a worker that is killed.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._log.close()

"""One answer from one worker, from nothing: model, worker, question, clean stop."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

import openblas
from smg_grpc_servicer.demo_model import ensure_demo_model
from smg_wire.errors import StartError

if TYPE_CHECKING:
    from collections.abc import Iterator

HOST = "127.0.0.1"
PROMPT = "Explain in two sentences why the sky is blue."
READY_SECONDS = 180.0
STOP_SECONDS = 30.0
LOG_LINES = 30


def say(text: str) -> None:
    """Print a line at once, so that it stands before what a subprocess prints."""
    print(text, flush=True)


def free_port() -> int:
    """Return a port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


def worker_environment() -> dict[str, str]:
    """Return the worker's environment: OpenBLAS before the slow BLAS, and no look at a hub."""
    preload = openblas.preload_environment()
    if sys.platform == "linux" and not preload:
        say(f"OpenBLAS is not installed ({openblas.COST}): sudo apt-get install {openblas.PACKAGE}")
    return {**os.environ, **preload, "HF_HUB_OFFLINE": "1"}


@contextlib.contextmanager
def running_worker(model: Path, port: int, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a worker for as long as the block lasts; whatever happens, it does not outlive it."""
    command = [sys.executable, "-m", "smg_grpc_servicer.mlx"]
    command += ["--model", str(model), "--host", HOST, "--port", str(port)]
    say(f"$ {' '.join(['python', *command[1:]])}")
    with log.open("wb") as output:
        worker = subprocess.Popen(
            command,
            env=worker_environment(),
            stdout=output,
            stderr=subprocess.STDOUT,
            # Ctrl-C is for this script, which then stops the worker as a supervisor would.
            start_new_session=True,
        )
    try:
        yield worker
    finally:
        if worker.poll() is None:
            worker.terminate()
            try:
                worker.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                worker.kill()
                worker.wait()


def wait_until_serving(worker: subprocess.Popen[bytes], port: int) -> bool:
    """Ask for the worker's health until it serves; False when it died or took too long."""
    deadline = time.monotonic() + READY_SECONDS
    options = (("grpc.enable_http_proxy", 0),)
    with grpc.insecure_channel(f"{HOST}:{port}", options=options) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        while worker.poll() is None and time.monotonic() < deadline:
            with contextlib.suppress(grpc.RpcError):
                reply = health.Check(health_pb2.HealthCheckRequest(), timeout=2)
                if reply.status == health_pb2.HealthCheckResponse.SERVING:
                    return True
            time.sleep(0.1)
    return False


def show_tail(log: Path) -> None:
    """Print the end of the worker's log on stderr."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    print("\n".join(lines[-LOG_LINES:]), file=sys.stderr, flush=True)


def ask(port: int, prompt: str) -> int:
    """Ask the worker; the answer goes to the terminal as it comes."""
    say(f'$ python -m smg_grpc_servicer ask {HOST}:{port} "{prompt}"')
    command = [sys.executable, "-m", "smg_grpc_servicer", "ask", f"{HOST}:{port}", prompt]
    return subprocess.run(command, check=False).returncode


def keep(worker: subprocess.Popen[bytes], port: int) -> None:
    """Serve until Ctrl-C, or until the worker ends by itself."""
    say(f'ask more: {sys.executable} -m smg_grpc_servicer ask {HOST}:{port} "your question"')
    with contextlib.suppress(KeyboardInterrupt):
        say("Ctrl-C stops the worker")
        worker.wait()


def stop(worker: subprocess.Popen[bytes], log: Path) -> int:
    """Stop the worker as a supervisor would, and tell whether it left cleanly."""
    worker.send_signal(signal.SIGTERM)
    try:
        code = worker.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        say(f"the worker did not stop within {STOP_SECONDS:.0f} s of SIGTERM")
        return 1
    if code:
        show_tail(log)
        say(f"the worker exited with {code} after SIGTERM")
        return 1
    say("the worker drained and exited with 0 after SIGTERM")
    return 0


def run(options: argparse.Namespace) -> int:
    """Run the demo and return its exit code."""
    model = ensure_demo_model("float32")
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="smg-demo-") as scratch:
        log = Path(scratch) / "worker.log"
        started = time.monotonic()
        with running_worker(model, port, log) as worker:
            if not wait_until_serving(worker, port):
                show_tail(log)
                code = worker.poll()
                how = "is not serving yet" if code is None else f"exited with {code}"
                say(f"the worker {how} after {time.monotonic() - started:.0f} s; its log is above")
                return 1
            say(f"serving after {time.monotonic() - started:.1f} s")
            answered = ask(port, options.prompt)
            if answered:
                show_tail(log)
                say(f"ask exited with {answered}; the worker's log is above")
            elif options.keep:
                keep(worker, port)
            return stop(worker, log) or answered


def main() -> int:
    """Parse the command line and run the demo."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prompt", nargs="?", default=PROMPT, help="what to ask")
    parser.add_argument("--keep", action="store_true", help="serve on until Ctrl-C")
    options = parser.parse_args()
    # A terminated demo leaves no worker behind: SystemExit unwinds, the default action does not.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        return run(options)
    except StartError as error:
        print(f"error: {error.message}", file=sys.stderr)
        return 3
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


if __name__ == "__main__":
    sys.exit(main())

"""The published router as a client: its process, and HTTP requests through it."""

from __future__ import annotations

import contextlib
import http.client
import json
import subprocess
import tempfile
import time
import urllib.request
from typing import TYPE_CHECKING, Any

from tests.support.processes import free_port

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

    from typing_extensions import Self

READY_SECONDS = 60.0
ANSWER_SECONDS = 120.0


class Router:
    """A router in front of one worker; leaving the block ends it."""

    def __init__(self, program: str, worker: str) -> None:
        self.port = free_port()
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  (closed by __exit__)
        command = [program, "launch", "--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--worker-urls", f"grpc://{worker}", "--prometheus-port", str(free_port())]
        self._process = subprocess.Popen(command, stdout=self._log, stderr=subprocess.STDOUT)

    def __enter__(self) -> Self:
        try:
            self._until_ready()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

    def _until_ready(self) -> None:
        deadline = time.monotonic() + READY_SECONDS
        while time.monotonic() < deadline and self._process.poll() is None:
            with contextlib.suppress(OSError, ValueError):
                if self._answers():
                    return
            time.sleep(0.2)
        self._log.seek(0)
        raise AssertionError(f"the router does not answer:\n{self._log.read()[-4000:]}")

    def _answers(self) -> bool:
        # It lists a model before it has the model's tokenizer.
        models = self.get("/v1/models")["data"]
        if not models:
            return False
        greeting = [{"role": "user", "content": "Hello"}]
        body = {"model": models[0]["id"], "messages": greeting, "max_tokens": 1}
        return self.post("/v1/chat/completions", body)[0] == 200

    def get(self, path: str) -> dict[str, Any]:
        """Return the JSON of a path."""
        url = f"http://127.0.0.1:{self.port}{path}"
        with urllib.request.urlopen(url, timeout=ANSWER_SECONDS) as response:
            found: dict[str, Any] = json.load(response)
            return found

    def post(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """Return the status and the JSON of an answer."""
        with self._open(path, body) as response:
            return response.status, json.loads(response.read())

    def events(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield a stream's events; closing the iterator hangs up."""
        with self._open(path, {**body, "stream": True}) as response:
            assert response.status == 200, response.read()
            for line in response:
                if line.startswith(b"data: {"):
                    yield json.loads(line[6:])

    @contextlib.contextmanager
    def _open(self, path: str, body: dict[str, Any]) -> Iterator[http.client.HTTPResponse]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=ANSWER_SECONDS)
        try:
            headers = {"Content-Type": "application/json"}
            connection.request("POST", path, json.dumps(body).encode(), headers)
            yield connection.getresponse()
        finally:
            connection.close()

"""MLX: this worker, the published one, mlx-lm's HTTP server and its bare batch generator.

All contenders stay up for the whole run and are measured in turn, one round after the other,
so that a machine whose speed drifts drifts for all of them. Prompts are new in every round: no
prefix cache helps. Decoding is greedy, with a fixed number of tokens. CPU is the server
process's own, user and system, divided by the tokens it generated; prefill is in it. OpenBLAS
has one thread: a second one spins while it waits, and its spinning would be counted.

The second table is the second turn of a chat over a long prefix: time to the first token of the
second turn against that of the first.

The environment names the interpreters: SMG_BENCH_OLD_PYTHON has mlx-lm 0.31.3 (for this worker
and the published one), the running one has the newest mlx-lm; SMG_BENCH_PUBLISHED is the
directory that the published package was installed into with `pip install --target`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
from smg_grpc_proto.generated import mlx_engine_pb2 as pb
from smg_grpc_proto.generated import mlx_engine_pb2_grpc

from smg_grpc_servicer.demo_model import ensure_demo_model

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

SOURCE = Path(__file__).resolve().parent.parent / "src"
READY_SECONDS = 180.0
_ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1"}
_TICKS = os.sysconf("SC_CLK_TCK")
# "Hello, my name is" in the demo model's tokens.
_GREETING = [19556, 28, 957, 1462, 314]
_WORDS = (
    *("river", "mountain", "winter", "garden", "engine", "harbour", "copper", "violin"),
    *("letter", "forest", "candle", "bridge", "market", "desert", "lantern", "pepper"),
    *("sailor", "tunnel", "museum", "thunder", "orchard", "compass", "village", "glacier"),
)


@dataclass
class Round:
    """One measurement: seconds of wall clock and CPU, tokens, seconds to each first token."""

    wall: float
    cpu: float
    tokens: int
    first: list[float]


@dataclass
class Contender:
    """A server under test: its process and how to send it prompts."""

    name: str
    pid: int
    rounds: dict[int, list[Round]] = field(default_factory=dict)
    turns: list[tuple[float, float]] = field(default_factory=list)

    async def generate(self, prompt: list[int], tokens: int) -> tuple[float, list[int]]:
        """Return seconds to the first token, and the tokens."""
        raise NotImplementedError

    async def measure(self, prompts: list[list[int]], tokens: int) -> Round:
        """Send all prompts at once."""
        cpu, began = cpu_seconds(self.pid), time.monotonic()
        answers = await asyncio.gather(*(self.generate(prompt, tokens) for prompt in prompts))
        return Round(
            wall=time.monotonic() - began,
            cpu=cpu_seconds(self.pid) - cpu,
            tokens=sum(len(ids) for _, ids in answers),
            first=[first for first, _ in answers],
        )


class GrpcWorker(Contender):
    """A worker that speaks the MLX engine's proto."""

    def __init__(self, name: str, pid: int, port: int) -> None:
        super().__init__(name, pid)
        channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}")
        self._stub: Any = mlx_engine_pb2_grpc.MlxEngineStub(channel)

    async def generate(self, prompt: list[int], tokens: int) -> tuple[float, list[int]]:
        """Stream one request."""
        request = pb.GenerateRequest(
            request_id=f"bench-{random.getrandbits(64):x}",
            tokenized=pb.TokenizedInput(input_ids=prompt),
            sampling_params=pb.SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True),
            stream=True,
        )
        began, first, ids = time.monotonic(), 0.0, []
        async for response in self._stub.Generate(request):
            if response.HasField("chunk"):
                first = first or time.monotonic() - began
                ids += response.chunk.token_ids
        return first, ids


class HttpServer(Contender):
    """mlx_lm.server, over its OpenAI-compatible completions."""

    def __init__(self, name: str, pid: int, port: int, model: Path, tokenizer: Any) -> None:
        super().__init__(name, pid)
        self._port = port
        self._model = str(model)
        self._tokenizer = tokenizer

    async def generate(self, prompt: list[int], tokens: int) -> tuple[float, list[int]]:
        """Stream one request; its tokens are counted by the server's own usage."""
        body = json.dumps(
            {
                "model": self._model,
                "prompt": self._tokenizer.decode(prompt, skip_special_tokens=False),
                "max_tokens": tokens,
                "temperature": 0.0,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        ).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        head = (
            "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        began, first, usage = time.monotonic(), 0.0, 0
        writer.write(head.encode() + body)
        async for line in reader:
            if line.startswith(b"data: [DONE]"):
                break
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            if event.get("choices") and event["choices"][0].get("text"):
                first = first or time.monotonic() - began
            usage = (event.get("usage") or {}).get("completion_tokens", usage)
        writer.close()
        return first, [0] * usage


class BareGenerator(Contender):
    """mlx-lm's BatchGenerator called directly, in a process that does nothing else."""

    def __init__(self, name: str, process: asyncio.subprocess.Process) -> None:
        super().__init__(name, process.pid)
        self._process = process

    async def measure(self, prompts: list[list[int]], tokens: int) -> Round:
        """Send all prompts in one line and read one line of figures back."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"prompts": prompts, "tokens": tokens}).encode())
        self._process.stdin.write(b"\n")
        return Round(**json.loads(await self._process.stdout.readline()))

    async def generate(self, prompt: list[int], tokens: int) -> tuple[float, list[int]]:
        """Measure one prompt alone."""
        measured = await self.measure([prompt], tokens)
        return measured.first[0], [0] * measured.tokens


def cpu_seconds(pid: int) -> float:
    """Return user and system CPU seconds of a process, all its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def serve_bare(model: str) -> None:
    """Answer lines of prompts on standard input with figures: the bare generator's process."""
    import resource

    # Python puts this directory first, and this file would pass for the package that it measures.
    sys.path.remove(str(Path(__file__).resolve().parent))
    from mlx_lm import load
    from mlx_lm.generate import BatchGenerator

    network = load(model)[0]
    generator = BatchGenerator(network, completion_batch_size=32, prefill_batch_size=8)

    def run(prompts: list[list[int]], tokens: int) -> Round:
        usage, began = resource.getrusage(resource.RUSAGE_SELF), time.monotonic()
        live = set(generator.insert(prompts, [tokens] * len(prompts)))
        first: dict[int, float] = {}
        count = 0
        while live:
            for response in generator.next()[1]:
                count += 1
                first.setdefault(response.uid, time.monotonic() - began)
                if response.finish_reason is not None:
                    live.discard(response.uid)
        after = resource.getrusage(resource.RUSAGE_SELF)
        cpu = after.ru_utime + after.ru_stime - usage.ru_utime - usage.ru_stime
        return Round(time.monotonic() - began, cpu, count, list(first.values()))

    run([[1, 2, 3, 4]], 2)
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(vars(run(**json.loads(line)))), flush=True)


def free_port() -> int:
    """Return a port that was free a moment ago."""
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def process(command: list[str], log: Path, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a server for as long as the block lasts."""
    with log.open("wb") as output:
        child = subprocess.Popen(
            command, stdout=output, stderr=output, env={**os.environ, **_ONE_THREAD, **environment}
        )
        try:
            yield child
        finally:
            child.terminate()
            try:
                child.wait(15)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()


async def until_answers(contender: Contender, child: subprocess.Popen[bytes], log: Path) -> None:
    """Ask until the first answer comes."""
    deadline = time.monotonic() + READY_SECONDS
    while True:
        try:
            if (await asyncio.wait_for(contender.generate(_GREETING, 2), 60))[1]:
                return
        except (OSError, grpc.RpcError, asyncio.TimeoutError):
            if child.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"{contender.name} did not start; its log is {log}") from None
        await asyncio.sleep(0.5)


@contextlib.asynccontextmanager
async def contenders(model: Path, tokenizer: Any, logs: Path) -> AsyncIterator[list[Contender]]:
    """Start every server and yield them, warm."""
    old = os.environ["SMG_BENCH_OLD_PYTHON"]
    published = os.environ["SMG_BENCH_PUBLISHED"]
    ours = ["-m", "smg_grpc_servicer.mlx.server", "--model", str(model), "--port"]
    async with contextlib.AsyncExitStack() as stack:
        found: list[Contender] = []

        async def add(make: Any, name: str, command: list[str], port: int, path: str) -> None:
            log = logs / f"{len(found)}.log"
            child = stack.enter_context(process(command, log, PYTHONPATH=path))
            contender = make(name, child.pid, port)
            await until_answers(contender, child, log)
            found.append(contender)

        for name, python, path in (
            ("this worker, mlx-lm 0.31.3", old, str(SOURCE)),
            ("published 0.14.1, mlx-lm 0.31.3", old, published),
            ("this worker, newest mlx-lm", sys.executable, str(SOURCE)),
        ):
            port = free_port()
            await add(GrpcWorker, name, [python, *ours, str(port)], port, path)
        port = free_port()
        await add(
            lambda name, pid, port: HttpServer(name, pid, port, model, tokenizer),
            "mlx_lm.server, newest mlx-lm",
            [sys.executable, "-m", "mlx_lm", "server", "--model", str(model), "--port", str(port)],
            port,
            "",
        )
        bare = await asyncio.create_subprocess_exec(
            *(sys.executable, __file__, "--bare", str(model)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, **_ONE_THREAD},
        )
        stack.callback(_kill, bare)
        assert bare.stdout is not None
        if not await bare.stdout.readline():
            raise SystemExit("the bare batch generator did not start")
        found.append(BareGenerator("batch generator in process, newest", bare))
        yield found


def _kill(child: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        child.kill()


def chat(tokenizer: Any, *messages: tuple[str, str]) -> list[int]:
    """Return the token ids of a conversation that asks for the next answer."""
    text = "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in messages)
    ids: list[int] = tokenizer.encode(f"{text}<|im_start|>assistant\n").ids
    return ids


def new_prompt(tokenizer: Any) -> list[int]:
    """Return a prompt that no server has seen, from its first words on."""
    words = random.sample(_WORDS, 4)
    return chat(tokenizer, ("user", f"{' '.join(words)}: write a long story about these things."))


async def second_turn(contender: Contender, tokenizer: Any, length: int) -> tuple[float, float]:
    """Return seconds to the first token of the first and of the second turn of one chat."""
    filler = " ".join(random.choices(_WORDS, k=length))
    first = chat(tokenizer, ("system", filler[: length * 6]), ("user", "Say one sentence."))[:]
    seconds, ids = await contender.generate(first, 16)
    follow = tokenizer.encode("<|im_end|>\n<|im_start|>user\nAnd another?<|im_end|>\n").ids
    again, _ = await contender.generate([*first, *ids, *follow], 4)
    return seconds, again


def print_streams(found: list[Contender], concurrency: int) -> None:
    """Print the table of one concurrency; ratios are to the last contender, the bare generator."""

    def median(contender: Contender, figure: Any) -> float:
        return statistics.median(figure(r) for r in contender.rounds[concurrency])

    def cpu(r: Round) -> float:
        return r.cpu / r.tokens * 1e3

    bare = median(found[-1], cpu)
    print(f"\n{concurrency} concurrent streams")
    print(f"{'':36} {'tokens/s':>9} {'CPU ms/token':>13} {'to bare':>8} {'first token s':>14}")
    for contender in found:
        used = median(contender, cpu)
        rate = median(contender, lambda r: r.tokens / r.wall)
        first = median(contender, lambda r: statistics.median(r.first))
        ratio = used / bare
        print(f"{contender.name:36} {rate:9.1f} {used:13.2f} {ratio:8.3f} {first:14.3f}")


def print_turns(found: list[Contender]) -> None:
    """Print the table of second turns."""
    print("\nsecond turn of a chat: seconds to the first token")
    print(f"{'':36} {'first turn':>11} {'second turn':>12} {'faster by':>10}")
    for contender in found:
        if contender.turns:
            first = statistics.median(turn[0] for turn in contender.turns)
            second = statistics.median(turn[1] for turn in contender.turns)
            print(f"{contender.name:36} {first:11.3f} {second:12.3f} {first / second:9.1f}x")


async def run(arguments: argparse.Namespace) -> None:
    """Measure everything and print the tables."""
    from tokenizers import Tokenizer

    model = ensure_demo_model("float32")
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    with tempfile.TemporaryDirectory() as logs:
        async with contenders(model, tokenizer, Path(logs)) as found:
            for number in range(arguments.rounds):
                for concurrency in arguments.streams:
                    for contender in found:
                        prompts = [new_prompt(tokenizer) for _ in range(concurrency)]
                        measured = await contender.measure(prompts, arguments.tokens)
                        contender.rounds.setdefault(concurrency, []).append(measured)
                for contender in found:
                    if isinstance(contender, GrpcWorker):
                        turn = await second_turn(contender, tokenizer, arguments.prefix)
                        contender.turns.append(turn)
                print(f"round {number + 1} of {arguments.rounds} done", file=sys.stderr)
    for concurrency in arguments.streams:
        print_streams(found, concurrency)
    print_turns(found)


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 16])
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--prefix", type=int, default=400, help="tokens of the second turn's prefix"
    )
    parser.add_argument("--bare", metavar="MODEL", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.bare:
        serve_bare(arguments.bare)
    else:
        asyncio.run(run(arguments))


if __name__ == "__main__":
    main()

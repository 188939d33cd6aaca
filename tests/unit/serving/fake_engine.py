"""An engine without a model: repeatable tokens, and every fault on demand."""

from __future__ import annotations

import asyncio
import random
import zlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from smg_grpc_servicer.serving.deltas import LENGTH, STOP, Delta, Finish, Logprobs
from smg_wire.errors import EngineDead, SmgError, from_engine_code

if TYPE_CHECKING:
    from smg_grpc_servicer.serving.deltas import Sink

VOCABULARY = 1000
CONTEXT = 4096
END_OF_SEQUENCE = 7


@dataclass(frozen=True)
class FakeRequest:
    """`fault`: "", "silent" (no token, ever), "die", "die-soon", or a code such as "429"."""

    prompt_ids: list[int]
    max_tokens: int
    stop_token_ids: frozenset[int] = frozenset()
    seed: int | None = None
    greedy: bool = True
    logprobs: int | None = None
    fault: str = ""


@dataclass
class FakeEngine:
    """Runs `slots` requests at once, a token each `step_seconds`."""

    slots: int = 32
    step_seconds: float = 0.0
    submitted: list[str] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.dead: asyncio.Future[EngineDead] = asyncio.get_running_loop().create_future()
        self._free = asyncio.Semaphore(self.slots)
        self._tasks: dict[str, asyncio.Task[None]] = {}

    @property
    def running(self) -> int:
        return len(self._tasks)

    def submit(self, engine_id: str, request: FakeRequest, sink: Sink) -> None:
        self.submitted.append(engine_id)
        task = asyncio.ensure_future(self._run(request, sink))
        self._tasks[engine_id] = task
        task.add_done_callback(lambda _: self._tasks.pop(engine_id, None))

    def abort(self, engine_id: str) -> None:
        self.aborted.append(engine_id)
        task = self._tasks.get(engine_id)
        if task is not None:
            task.cancel()

    def die(self, reason: str = "the fake engine was told to die") -> None:
        if not self.dead.done():
            self.dead.set_result(EngineDead(reason))

    async def close(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, request: FakeRequest, sink: Sink) -> None:
        if request.fault == "die":
            self.die()
        if request.fault == "die-soon":
            asyncio.get_running_loop().call_later(0.7, self.die)
        if request.fault.isdigit():
            sink.fail(from_engine_code(int(request.fault), "the fake engine refuses"))
            return
        if request.fault:
            await asyncio.Event().wait()
        async with self._free:
            try:
                await self._generate(request, sink)
            except SmgError as error:
                sink.fail(error)

    async def _generate(self, request: FakeRequest, sink: Sink) -> None:
        output: list[int] = []
        draw = random.Random(request.seed)
        while True:
            await asyncio.sleep(self.step_seconds)
            token = next_token(request.prompt_ids + output)
            if not request.greedy:
                token = draw.randrange(8, VOCABULARY)
            output.append(token)
            finish = None
            if token in request.stop_token_ids:
                finish = Finish(STOP, None if token == END_OF_SEQUENCE else token)
            elif len(output) >= request.max_tokens:
                finish = Finish(LENGTH)
            sink.push(
                Delta(
                    0,
                    [token],
                    len(request.prompt_ids),
                    len(output),
                    logprobs=_logprobs(token, request.logprobs),
                    finish=finish,
                )
            )
            if finish is not None:
                return


def next_token(ids: list[int]) -> int:
    """What this "model" finds most likely after `ids`; never the end of the sequence."""
    return 8 + zlib.crc32(repr(ids).encode()) % (VOCABULARY - 8)


def _logprobs(token: int, alternatives: int | None) -> Logprobs | None:
    if alternatives is None:
        return None
    ranked = [((token + rank) % VOCABULARY, -0.5 - rank) for rank in range(alternatives)]
    return Logprobs([token], [-0.5], [ranked])

"""`python -m tests.support.fake_worker`: a whole worker over the fake engine.

It speaks the smallest wire there is, MLX's. A `text` input is a fault of `FakeRequest`, or
"crash" for a handler that raises what no error tree knows.
"""

from __future__ import annotations

import asyncio
import math
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from smg_grpc_proto.generated import common_pb2, mlx_engine_pb2_grpc
from smg_grpc_proto.generated import mlx_engine_pb2 as pb
from tests.support.fake_engine import (
    CONTEXT,
    END_OF_SEQUENCE,
    VOCABULARY,
    FakeEngine,
    FakeRequest,
)

from smg_grpc_servicer.serving import checks, lifecycle
from smg_grpc_servicer.serving.generation import Generations
from smg_grpc_servicer.serving.health import State
from smg_grpc_servicer.settings import ServingSettings
from smg_wire import tokenizer_bundle
from smg_wire.errors import EngineDead, InvalidRequest, StartError
from smg_wire.settings import option

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    import grpc

    from smg_grpc_servicer.serving.deltas import Delta, Logprobs
    from smg_grpc_servicer.serving.health import Health
    from smg_wire.observability import WorkerMetrics

SERVICE = "mlx.grpc.engine.MlxEngine"
MODEL = "fake-model"


class FakeSettings(ServingSettings):
    slots: int = option(4, ge=1, help="Requests that run at once.")
    step_seconds: float = option(0.002, ge=0, help="Seconds a token takes.")
    warm_seconds: float = option(0.0, ge=0, help="Seconds the warm-up takes.")
    tokenizer: Path = option(Path(), help="Directory that GetTokenizer packs.")
    die_after: float = option(0.0, ge=0, help="Seconds until the engine dies; 0 is never.")
    fault: Literal[
        "",
        "start-refused",
        "start-crash",
        "start-dead",
        "start-busy-thread",
        "close-never",
        "close-crash",
    ] = option("", help="What goes wrong with the process.")


class FakeWorker:
    services: Sequence[str] = (SERVICE,)

    def __init__(self, settings: FakeSettings, health: Health, metrics: WorkerMetrics) -> None:
        self._settings = settings
        self._health = health
        self._metrics = metrics
        self.engine = FakeEngine(slots=settings.slots, step_seconds=settings.step_seconds)
        self.generations = Generations(
            health=health,
            metrics=metrics,
            abort_engine=self.engine.abort,
            slots=settings.slots,
            max_queued=settings.max_queued_requests,
        )

    def register(self, server: grpc.aio.Server) -> None:
        servicer = FakeServicer(self.engine, self.generations, self._health, self._settings)
        mlx_engine_pb2_grpc.add_MlxEngineServicer_to_server(servicer, server)

    async def start(self) -> None:
        match self._settings.fault:
            case "start-refused":
                raise StartError("no such model: fake")
            case "start-crash":
                raise ZeroDivisionError("a bug while loading")
            case "start-dead":
                raise EngineDead("the engine died while it warmed up")
            case "start-busy-thread":
                await asyncio.to_thread(time.sleep, 60)
        # How a test breaks the engine of a running worker.
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, self.engine.die)
        self._health.to(State.WARMING)
        self._metrics.set_model(MODEL)
        await asyncio.sleep(self._settings.warm_seconds)
        if self._settings.die_after:
            asyncio.get_running_loop().call_later(self._settings.die_after, self.engine.die)

    async def died(self) -> EngineDead:
        return await self.engine.dead

    async def close(self) -> None:
        match self._settings.fault:
            case "close-never":
                await asyncio.to_thread(time.sleep, 60)
            case "close-crash":
                raise ZeroDivisionError("a bug while closing")
        await self.engine.close()


class FakeServicer(mlx_engine_pb2_grpc.MlxEngineServicer):
    def __init__(
        self,
        engine: FakeEngine,
        generations: Generations,
        health: Health,
        settings: FakeSettings,
    ) -> None:
        self._engine = engine
        self._generations = generations
        self._health = health
        self._settings = settings

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> None:
        plan = convert(request)
        async with self._generations.open(request.request_id) as generation:
            self._engine.submit(generation.engine_id, plan, generation)
            if not request.stream:
                for delta in await generation.collect():
                    await context.write(_complete(delta, whole=True))
                return
            async for delta in generation:
                if delta.token_ids:
                    await context.write(_chunk(delta))
                if delta.finish is not None:
                    await context.write(_complete(delta, whole=False))

    async def Abort(self, request: pb.AbortRequest, context: Any) -> pb.AbortResponse:
        self._generations.abort(request.request_ids)
        return pb.AbortResponse()

    async def HealthCheck(self, request: Any, context: Any) -> pb.HealthCheckResponse:
        state = self._health.state
        return pb.HealthCheckResponse(healthy=state is State.SERVING, message=state.label)

    async def GetModelInfo(self, request: Any, context: Any) -> pb.GetModelInfoResponse:
        return pb.GetModelInfoResponse(
            model_path=str(self._settings.tokenizer),
            is_generation=True,
            served_model_name=MODEL,
            vocab_size=VOCABULARY,
            max_context_length=CONTEXT,
            eos_token_ids=[END_OF_SEQUENCE],
        )

    async def GetServerInfo(self, request: Any, context: Any) -> pb.GetServerInfoResponse:
        return pb.GetServerInfoResponse(active_requests=self._generations.in_flight)

    async def GetTokenizer(
        self, request: Any, context: Any
    ) -> AsyncIterator[common_pb2.GetTokenizerChunk]:
        bundle = await asyncio.to_thread(tokenizer_bundle.pack, self._settings.tokenizer)
        for data, sha256 in bundle.chunks():
            yield common_pb2.GetTokenizerChunk(data=data, sha256=sha256)


def convert(request: pb.GenerateRequest) -> FakeRequest:
    if request.text == "crash":
        raise ZeroDivisionError("a secret of the server")
    if request.WhichOneof("input") is None:
        raise InvalidRequest("input", None, "set tokenized or text")
    fault = request.text
    asked = [1] if fault else request.tokenized.input_ids
    params, name = request.sampling_params, "sampling_params.{}".format
    ids = checks.prompt_ids("tokenized.input_ids", asked, vocab_size=VOCABULARY, context=CONTEXT)
    temperature = params.temperature if params.HasField("temperature") else 1.0
    checks.number(name("temperature"), temperature, 0.0, math.inf)
    checks.top_p(name("top_p"), params.top_p)
    checks.number(name("min_p"), params.min_p, 0.0, 1.0)
    checks.repetition_penalty(name("repetition_penalty"), params.repetition_penalty)
    checks.penalty(name("frequency_penalty"), params.frequency_penalty)
    checks.penalty(name("presence_penalty"), params.presence_penalty)
    checks.logit_bias(name("logit_bias"), params.logit_bias, vocab_size=VOCABULARY)
    stops = checks.stop_token_ids(
        name("stop_token_ids"), params.stop_token_ids, vocab_size=VOCABULARY
    )
    if params.HasField("seed"):
        checks.integer(name("seed"), params.seed, 0)
    if params.HasField("logprobs"):
        checks.integer(name("logprobs"), params.logprobs, 0, 20)
    return FakeRequest(
        prompt_ids=ids,
        max_tokens=checks.max_tokens(
            name("max_tokens"),
            params.max_tokens if params.HasField("max_tokens") else None,
            prompt_tokens=len(ids),
            context=CONTEXT,
        ),
        stop_token_ids=frozenset(stops)
        | frozenset(() if params.ignore_eos else (END_OF_SEQUENCE,)),
        seed=params.seed if params.HasField("seed") else None,
        greedy=temperature == 0,
        logprobs=params.logprobs if params.HasField("logprobs") else None,
        forced=next((key for key, bias in params.logit_bias.items() if bias == 100), None),
        fault=fault,
    )


def _chunk(delta: Delta) -> pb.GenerateResponse:
    return pb.GenerateResponse(
        chunk=pb.GenerateStreamChunk(
            token_ids=delta.token_ids,
            prompt_tokens=delta.prompt_tokens,
            completion_tokens=delta.completion_tokens,
            output_logprobs=_logprobs(delta.logprobs),
        )
    )


def _complete(delta: Delta, *, whole: bool) -> pb.GenerateResponse:
    matched = delta.finish.matched if delta.finish else None
    return pb.GenerateResponse(
        complete=pb.GenerateComplete(
            output_ids=delta.token_ids if whole else (),
            finish_reason=delta.finish.reason if delta.finish else "",
            prompt_tokens=delta.prompt_tokens,
            completion_tokens=delta.completion_tokens,
            output_logprobs=_logprobs(delta.logprobs) if whole else None,
            matched_stop_token_id=matched if isinstance(matched, int) else None,
        )
    )


def _logprobs(logprobs: Logprobs | None) -> pb.OutputLogProbs | None:
    if logprobs is None:
        return None
    return pb.OutputLogProbs(
        token_logprobs=logprobs.values,
        token_ids=logprobs.token_ids,
        top_logprobs=[
            pb.TopLogProbs(values=[v for _, v in top], token_ids=[t for t, _ in top])
            for top in logprobs.top
        ],
    )


def main(argv: Sequence[str]) -> int:
    # The bound is ten seconds for a real engine; no test waits that long.
    lifecycle._CLOSE_SECONDS = 0.5
    return lifecycle.run(FakeSettings, FakeWorker, engine="fake", argv=argv)


if __name__ == "__main__":
    import sys

    lifecycle.leave(main(sys.argv[1:]))

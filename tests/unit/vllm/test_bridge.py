from __future__ import annotations

import asyncio
import contextlib
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from tests.support.fake_vllm import (
    EngineClient,
    EngineDeadError,
    QueueOverflowError,
    RequestOutputKind,
    SamplingParams,
    VLLMValidationError,
    completion,
    output,
)

from smg_grpc_servicer.serving.generation import Generation, Generations
from smg_grpc_servicer.serving.health import Health, State
from smg_grpc_servicer.vllm.bridge import EngineBridge
from smg_grpc_servicer.vllm.constraints import Constraint
from smg_grpc_servicer.vllm.requests import Plan
from smg_wire.errors import (
    EngineDead,
    EngineRefusal,
    InvalidRequest,
    Overloaded,
    SmgError,
    Unavailable,
)
from smg_wire.observability import WorkerMetrics

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from smg_grpc_servicer.serving.deltas import Delta

pytestmark = pytest.mark.usefixtures("vllm")


class Bench:
    """The bridge and the serving core round an engine client that is told what to do."""

    def __init__(self) -> None:
        self.client = EngineClient()
        self.bridge = EngineBridge(self.client)
        health = Health()
        health.to(State.SERVING)
        self.generations = Generations(
            health=health,
            metrics=WorkerMetrics("vllm"),
            abort_engine=self.bridge.abort,
            engine_speaks_last=True,
            slots=8,
            max_queued=8,
        )

    @contextlib.asynccontextmanager
    async def running(self, plan: Plan | None = None) -> AsyncIterator[Generation]:
        plan = plan or make_plan()
        async with self.generations.open("r", choices=plan.choices) as generation:
            await self.bridge.submit(generation, plan)
            yield generation


@pytest.fixture
def bench() -> Bench:
    return Bench()


def make_plan(**fields: Any) -> Plan:
    params = SamplingParams(
        logprobs=None, prompt_logprobs=None, output_kind=RequestOutputKind.DELTA
    )
    return Plan(prompt_ids=[1, 2, 3], params=params, **fields)


async def read(generation: Generation) -> list[Delta]:
    return [delta async for delta in generation]


async def run(bench: Bench, *given: Any, plan: Plan | None = None) -> list[Delta]:
    """Run a request for which vLLM puts what is given."""
    async with bench.running(plan) as generation:
        for one in given:
            bench.client.only.put(one)
        return await read(generation)


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_tokens_go_from_vllms_output_task_to_the_reader(bench: Bench) -> None:
    async with bench.running() as generation:
        reader = asyncio.ensure_future(read(generation))
        for token in (5, 6):
            await settle()
            bench.client.only.put(output(completion(token_ids=(token,))))
        await settle()
        bench.client.only.put(output(completion(token_ids=(7,), finish_reason="length")))
        deltas = await reader
    assert [delta.token_ids for delta in deltas] == [[5], [6], [7]]
    assert bench.client.aborted == []
    assert bench.bridge.live == 0


async def test_no_task_is_made_for_a_request(bench: Bench) -> None:
    before = len(asyncio.all_tasks())
    async with bench.running() as generation:
        bench.client.only.put(output(completion(token_ids=(5,))))
        await generation.__anext__()
        assert len(asyncio.all_tasks()) == before
        bench.client.only.put(output(completion(finish_reason="stop")))


async def test_what_came_before_the_request_was_handed_over_is_not_lost(bench: Bench) -> None:
    bench.client.early = output(completion(token_ids=(5,), finish_reason="length"))
    async with bench.running() as generation:
        (delta,) = await read(generation)
    assert delta.token_ids == [5]
    assert bench.bridge.live == 0


async def test_the_prompt_is_taken_as_it_is_unless_a_constraint_is_to_be_compiled(
    bench: Bench,
) -> None:
    async with bench.running():
        pass
    constraint = Constraint("regex", "a", True)
    async with bench.running(make_plan(constraint=constraint, data_parallel_rank=1)):
        pass
    (plain, _, options), (rendered, _, constrained) = bench.client.added
    assert plain == {"type": "token", "prompt_token_ids": [1, 2, 3]}
    assert options == {}
    assert rendered == {"prompt_token_ids": [1, 2, 3]}
    assert constrained == {"data_parallel_rank": 1, "reasoning_ended": True}


async def test_trace_headers_go_to_an_engine_that_traces(bench: Bench) -> None:
    headers = {"traceparent": "00-1-2-01"}
    for endpoint in (None, "http://collector:4317"):
        bench.client.observability_config = SimpleNamespace(otlp_traces_endpoint=endpoint)  # type: ignore[attr-defined]
        bridge = EngineBridge(bench.client)
        async with bench.generations.open("") as generation:
            await bridge.submit(generation, make_plan(), trace_headers=headers)
    options = [more for _, _, more in bench.client.added]
    assert options == [{}, {"trace_headers": headers}]


# Ends.


async def test_an_abort_rpc_ends_with_what_vllm_held_back(bench: Bench) -> None:
    bench.client.last_words = output(completion(token_ids=(5, 6), finish_reason="abort"))
    async with bench.running() as generation:
        assert bench.generations.abort(["r"]) == [True]
        (delta,) = await generation.collect()
    assert delta.token_ids == [5, 6]
    assert delta.finish is not None
    assert delta.finish.reason == "abort"
    assert bench.client.aborted == [(bench.client.only.request_id, True)]


async def test_an_abort_that_vllm_has_no_words_for_ends_all_the_same(bench: Bench) -> None:
    async with bench.running() as generation:
        bench.generations.abort(["r"])
        (delta,) = await read(generation)
    assert delta.finish is not None
    assert delta.finish.reason == "abort"


async def test_aborting_twice_is_one_abort(bench: Bench) -> None:
    async with bench.running():
        assert bench.generations.abort(["r"]) == [True]
        assert bench.generations.abort(["r"]) == [False]
    await settle()
    assert len(bench.client.aborted) == 1


async def test_a_client_that_leaves_is_one_abort(bench: Bench) -> None:
    started = asyncio.Event()

    async def handler() -> None:
        async with bench.running() as generation:
            started.set()
            await read(generation)

    task = asyncio.ensure_future(handler())
    await started.wait()
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    await settle()
    assert len(bench.client.aborted) == 1
    assert bench.bridge.live == 0


@pytest.mark.parametrize("how", ["cancel", "abort", "both"])
async def test_a_request_that_ends_while_it_is_handed_over_is_dropped_once(
    bench: Bench, how: str
) -> None:
    bench.client.hold = asyncio.Event()

    async def handler() -> list[Delta]:
        async with bench.running() as generation:
            return await read(generation)

    task = asyncio.ensure_future(handler())
    await settle()
    if how != "cancel":
        assert bench.generations.abort(["r"]) == [True]
        await settle()
        # vLLM may not know it yet.
        assert bench.client.aborted == []
    if how == "abort":
        bench.client.hold.set()
        (delta,) = await task
        assert delta.finish is not None
        assert delta.finish.reason == "abort"
    else:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    await settle()
    assert len(bench.client.aborted) == 1
    assert bench.bridge.live == 0


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (VLLMValidationError, EngineRefusal),
        (ValueError, EngineRefusal),
        (QueueOverflowError, Overloaded),
        (EngineDeadError, EngineDead),
    ],
)
async def test_what_vllm_refuses_is_refused(
    bench: Bench, error: type[Exception], kind: type[SmgError]
) -> None:
    bench.client.refuse = error("no")
    with pytest.raises(kind):
        await run(bench)
    assert bench.bridge.live == 0
    assert bench.generations.in_flight == 0


async def test_a_constraint_that_does_not_compile_is_named(bench: Bench) -> None:
    bench.client.refuse = VLLMValidationError("unclosed\n  group " + "x" * 1000)
    constraint = Constraint("regex", "(((", False)
    with pytest.raises(InvalidRequest) as caught:
        await run(bench, plan=make_plan(constraint=constraint))
    assert caught.value.message.startswith("sampling_params.regex is '(((': unclosed group x")
    assert len(caught.value.message) < 500


async def test_a_strangers_error_is_not_shown(bench: Bench) -> None:
    bench.client.refuse = ZeroDivisionError("a secret")
    with pytest.raises(ZeroDivisionError):
        await run(bench)
    await settle()
    # vLLM may have noted the request before the error came.
    assert len(bench.client.aborted) == 1


@pytest.mark.parametrize("error", [EngineDeadError, RuntimeError])
async def test_what_vllm_gives_everyone_is_the_engines_death(
    bench: Bench, error: type[Exception]
) -> None:
    with pytest.raises(EngineDead):
        await run(bench, error("the output task broke"))
    await settle()
    assert bench.client.aborted == []


async def test_one_choice_that_fails_ends_its_siblings_in_vllm_too(bench: Bench) -> None:
    failed = output(completion(1, (), "abort"), finished=False)
    with pytest.raises(Unavailable):
        await run(bench, failed, plan=make_plan(choices=2))
    await settle()
    assert len(bench.client.aborted) == 1


async def test_an_output_that_cannot_be_read_fails_its_request_and_no_other(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(SmgError, match="could not be read"):
        # What puts it serves every request: nothing may come out there.
        await run(bench, output(completion(0, (5,), "stop"), prompt_token_ids=5))
    assert "could not be converted" in caplog.text
    await settle()


async def test_an_abort_that_vllm_does_not_take_is_logged(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    async def refuse(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("broken")

    bench.client.abort = refuse  # type: ignore[method-assign]
    async with bench.running():
        pass
    await settle()
    assert "did not take the abort" in caplog.text

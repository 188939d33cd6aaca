from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tests.lanes.mlx.library import Reference, references

from smg_grpc_servicer.mlx.config import EngineConfig, MlxRequest
from smg_grpc_servicer.mlx.engine import MlxEngine
from smg_grpc_servicer.mlx.generator import make_generator
from smg_grpc_servicer.mlx.sampling import Sampling
from smg_wire.errors import EngineDead, StartError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from smg_grpc_servicer.mlx.model import LoadedModel
    from smg_grpc_servicer.serving.deltas import Delta
    from smg_wire.errors import SmgError

pytestmark = pytest.mark.engine

GREEDY = Sampling(temperature=0.0)
STORY = "Once upon a time there was a small village by the sea, and in that village "


@dataclass
class Collector:
    """A sink that keeps what it is given."""

    deltas: list[Delta] = field(default_factory=list)
    error: SmgError | None = None
    done: asyncio.Event = field(default_factory=asyncio.Event)
    first: asyncio.Event = field(default_factory=asyncio.Event)

    def push(self, delta: Delta) -> None:
        assert not self.done.is_set(), "pushed after the end"
        self.deltas.append(delta)
        self.first.set()
        if delta.finish is not None:
            self.done.set()

    def fail(self, error: SmgError) -> None:
        assert not self.done.is_set(), "failed after the end"
        self.error = error
        self.done.set()

    @property
    def token_ids(self) -> list[int]:
        return [token for delta in self.deltas for token in delta.token_ids]

    async def finished(self) -> Collector:
        await asyncio.wait_for(self.done.wait(), 120)
        assert self.error is None, self.error
        return self


class Driver:
    """An engine and names for its requests."""

    def __init__(self, engine: MlxEngine, loaded: LoadedModel) -> None:
        self.engine = engine
        self.loaded = loaded
        self._count = 0

    def ids(self, text: str) -> list[int]:
        return list(self.loaded.tokenizer.encode(text))

    def submit(
        self,
        prompt: list[int],
        *,
        sampling: Sampling = GREEDY,
        max_tokens: int = 16,
        stop: frozenset[int] = frozenset(),
        logprobs: int | None = None,
    ) -> tuple[str, Collector]:
        self._count += 1
        sink, name = Collector(), f"request-{self._count}"
        request = MlxRequest(prompt, sampling, max_tokens, stop, logprobs)
        self.engine.submit(name, request, sink)
        return name, sink

    async def run(self, prompt: list[int], **how: Any) -> Collector:
        return await self.submit(prompt, **how)[1].finished()

    async def idle(self) -> None:
        """Wait until no request is left anywhere."""
        for _ in range(600):
            if not self.engine.running and not self.engine.waiting:
                return
            await asyncio.sleep(0.05)
        raise AssertionError(self.engine.stats)


async def started(
    config: EngineConfig, factory: Callable[[Any, EngineConfig], Any] = make_generator
) -> Driver:
    engine = MlxEngine(config, factory)
    return Driver(engine, await engine.start())


@pytest.fixture
async def driver(demo_model: str) -> AsyncIterator[Driver]:
    driver = await started(EngineConfig(demo_model, prefill_step_size=64))
    yield driver
    await driver.engine.close()


@pytest.fixture(scope="session")
def reference(demo_model: str) -> Reference:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(Path(demo_model) / "tokenizer.json"))
    (reference,) = references(Path(demo_model), [tokenizer.encode(STORY).ids], 32)
    return reference


async def test_facts_of_the_model(driver: Driver, demo_model: str) -> None:
    facts = driver.loaded.facts
    assert facts.model_path == demo_model
    assert facts.vocab_size == 49152
    assert facts.max_context_length == 8192
    assert facts.model_type == "llama"
    assert facts.architectures == ("LlamaForCausalLM",)
    assert 2 in facts.eos_token_ids


async def test_greedy_alone_is_the_library_s_own(driver: Driver, reference: Reference) -> None:
    prompt = driver.ids(STORY)
    collected = await driver.run(
        prompt, max_tokens=32, stop=frozenset(driver.loaded.facts.eos_token_ids)
    )
    reference.check(collected.token_ids)
    last = collected.deltas[-1]
    assert last.prompt_tokens == len(prompt)
    assert last.completion_tokens == len(reference.ids)
    assert last.finish is not None
    assert (last.finish.reason, last.finish.matched) == ("length", None)


async def test_greedy_in_company_is_the_same(driver: Driver, reference: Reference) -> None:
    prompt = driver.ids(STORY)
    _, watched = driver.submit(prompt, max_tokens=32)
    others = [
        driver.submit(driver.ids(f"{n} is a number that"), max_tokens=4 + n)[1] for n in range(7)
    ]
    await watched.first.wait()
    # Long prompts join while the others decode, sampled and penalised ones among them.
    for n in range(8):
        sampling = GREEDY if n % 2 else Sampling(seed=n, top_p=0.9, presence_penalty=0.5)
        long_prompt = driver.ids(f"{n} " + STORY * (3 + n))
        others.append(driver.submit(long_prompt, max_tokens=6 + n, sampling=sampling)[1])
    late = driver.submit(prompt, max_tokens=32)[1]
    for other in others:
        await other.finished()
    reference.check((await watched.finished()).token_ids)
    reference.check((await late.finished()).token_ids)
    await driver.idle()


async def test_a_greedy_batch_does_not_make_a_later_sampled_request_greedy(
    driver: Driver,
) -> None:
    """Rows that leave must take their samplers with them, in every release of mlx-lm."""
    prompt = driver.ids(STORY)
    sampled = Sampling(seed=5, temperature=1.5)
    alone = await driver.run(prompt, sampling=sampled, max_tokens=8)
    _, long_running = driver.submit(driver.ids("The sea"), max_tokens=30)
    short = [driver.submit(driver.ids(f"{n} boats"), max_tokens=2)[1] for n in range(3)]
    for sink in short:
        await sink.finished()
    late = await driver.run(prompt, sampling=sampled, max_tokens=8)
    await long_running.finished()
    assert late.token_ids == alone.token_ids


async def test_penalties_join_a_batch_that_has_none(driver: Driver) -> None:
    _, plain = driver.submit(driver.ids("The sea"), max_tokens=20)
    await plain.first.wait()
    penalised = Sampling(
        temperature=0.0, frequency_penalty=2.0, presence_penalty=2.0, repetition_penalty=1.5
    )
    collected = await driver.run(driver.ids("a a a a a a"), sampling=penalised, max_tokens=12)
    await plain.finished()
    assert len(set(collected.token_ids)) > len(collected.token_ids) // 2


async def test_bias_decides_and_raw_logprobs_do_not_see_it(driver: Driver) -> None:
    prompt = driver.ids(STORY)
    plain = await driver.run(prompt, logprobs=2, max_tokens=1)
    biased = await driver.run(
        prompt,
        sampling=Sampling(temperature=0.0, logit_bias={1234: 1e4, 10**9: 5.0}),
        logprobs=2,
        max_tokens=3,
    )
    assert biased.token_ids == [1234] * 3
    first, raw = biased.deltas[0].logprobs, plain.deltas[0].logprobs
    assert first is not None
    assert raw is not None
    assert first.values[0] < raw.values[0]
    assert [i for i, _ in first.top[0]] == [i for i, _ in raw.top[0]]
    assert first.top[0][0][1] == pytest.approx(raw.top[0][0][1], abs=1e-3)


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(seed=42),
        Sampling(seed=42, temperature=0.7, top_p=0.9),
        Sampling(seed=42, top_k=40, top_p=0.95, min_p=0.02, repetition_penalty=1.1),
    ],
)
async def test_a_seed_gives_one_output_alone_and_in_company(
    driver: Driver, sampling: Sampling
) -> None:
    prompt = driver.ids(STORY)
    alone = [(await driver.run(prompt, sampling=sampling)).token_ids for _ in range(2)]
    others = [
        driver.submit(driver.ids(f"{n}" + STORY), sampling=Sampling(), max_tokens=20)[1]
        for n in range(5)
    ]
    await others[0].first.wait()
    crowded = await driver.run(prompt, sampling=sampling)
    for other in others:
        await other.finished()
    assert alone[0] == alone[1] == crowded.token_ids


async def test_without_a_seed_outputs_differ(driver: Driver) -> None:
    prompt = driver.ids(STORY)
    outputs = [(await driver.run(prompt, sampling=Sampling())).token_ids for _ in range(3)]
    assert len({tuple(output) for output in outputs}) > 1


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(seed=1, top_k=10**6),
        Sampling(seed=1, top_k=49152),
        Sampling(seed=1, top_p=1e-9),
        Sampling(seed=1, min_p=1.0),
        Sampling(seed=1, temperature=2e-5),
        Sampling(seed=1, temperature=1e30),
        Sampling(seed=1, repetition_penalty=1e-30),
        Sampling(seed=1, repetition_penalty=1e30, temperature=2e-5, top_p=0.5),
        Sampling(seed=1, logit_bias={5: -1e38, 6: 1e38}, min_p=0.5, top_k=3),
        Sampling(seed=2**64 - 1),
        Sampling(seed=0, frequency_penalty=-2, presence_penalty=-2),
    ],
)
async def test_extreme_values_give_tokens(driver: Driver, sampling: Sampling) -> None:
    collected = await driver.run(driver.ids(STORY), sampling=sampling, max_tokens=3)
    assert all(0 <= token < 49152 for token in collected.token_ids)


async def test_the_best_token_passes_the_narrowest_filters(driver: Driver) -> None:
    prompt = driver.ids(STORY)
    best = (await driver.run(prompt, max_tokens=4)).token_ids
    for sampling in (
        Sampling(seed=3, top_k=1),
        Sampling(seed=3, top_p=1e-9),
        Sampling(seed=3, min_p=1.0),
        Sampling(seed=3, temperature=2e-5),
    ):
        assert (await driver.run(prompt, sampling=sampling, max_tokens=4)).token_ids == best


async def test_the_second_turn_reuses_the_first(demo_model: str) -> None:
    driver = await started(EngineConfig(demo_model))
    fresh = await started(EngineConfig(demo_model, prefix_cache_bytes=0))
    prompt = driver.ids(STORY * 20)
    first = await driver.run(prompt, max_tokens=8)
    assert first.deltas[-1].cached_tokens == 0
    await driver.idle()
    same = await driver.run(prompt, max_tokens=8)
    assert same.deltas[-1].cached_tokens == len(prompt) - 1
    assert same.token_ids == first.token_ids
    turn = prompt + first.token_ids + driver.ids(" And then the fishermen came home.")
    second = await driver.run(turn, max_tokens=16)
    assert second.deltas[-1].cached_tokens == len(prompt) + 8
    uncached = await fresh.run(turn, max_tokens=16)
    assert uncached.deltas[-1].cached_tokens == 0
    assert second.token_ids == uncached.token_ids
    # A fork from the middle of what is kept.
    fork = prompt[:200] + driver.ids(" But no.")
    forked = await driver.run(fork, max_tokens=8)
    assert forked.deltas[-1].cached_tokens == 200
    assert forked.token_ids == (await fresh.run(fork, max_tokens=8)).token_ids
    assert driver.engine.stats.prefix_cache_entries >= 1
    assert fresh.engine.stats.prefix_cache_bytes == 0
    await driver.engine.close()
    await fresh.engine.close()


async def test_a_window_that_cannot_be_trimmed_is_reused_as_a_whole(demo_model: str) -> None:
    from mlx_lm.models.cache import RotatingKVCache

    def windowed(model: Any, config: EngineConfig) -> Any:
        model.make_cache = lambda: [RotatingKVCache(max_size=64) for _ in model.layers]
        return make_generator(model, config)

    driver = await started(EngineConfig(demo_model), windowed)
    fresh = await started(EngineConfig(demo_model, prefix_cache_bytes=0), windowed)
    prompt = driver.ids(STORY * 8)
    first = await driver.run(prompt, max_tokens=8)
    await driver.idle()
    same = await driver.run(prompt, max_tokens=8)
    assert same.deltas[-1].cached_tokens == len(prompt) - 1
    assert same.token_ids == first.token_ids
    turn = prompt + driver.ids("the sun came up over the water")
    second = await driver.run(turn, max_tokens=8)
    assert second.deltas[-1].cached_tokens == len(prompt) - 1
    assert second.token_ids == (await fresh.run(turn, max_tokens=8)).token_ids
    await driver.engine.close()
    await fresh.engine.close()


async def test_logprobs_of_chosen_and_best(driver: Driver) -> None:
    prompt = driver.ids(STORY)
    collected = await driver.run(
        prompt, sampling=Sampling(seed=7, temperature=2.0), logprobs=5, max_tokens=6
    )
    for delta in collected.deltas:
        logprobs = delta.logprobs
        assert logprobs is not None
        assert logprobs.token_ids == delta.token_ids
        assert logprobs.values[0] <= 0
        values = [value for _, value in logprobs.top[0]]
        assert values == sorted(values, reverse=True)
        assert len(values) == 5
        assert sum(np.exp(values)) <= 1.0001
    only_chosen = await driver.run(prompt, logprobs=0, max_tokens=2)
    assert all(d.logprobs is not None and d.logprobs.top == [[]] for d in only_chosen.deltas)
    none = await driver.run(prompt, max_tokens=2)
    assert all(d.logprobs is None for d in none.deltas)


async def test_a_stop_token_is_in_the_output_and_named(driver: Driver) -> None:
    prompt = driver.ids(STORY)
    free = (await driver.run(prompt, max_tokens=12)).token_ids
    stop = free[5]
    collected = await driver.run(prompt, max_tokens=12, stop=frozenset({stop}))
    assert collected.token_ids == free[: free.index(stop) + 1]
    finish = collected.deltas[-1].finish
    assert finish is not None
    assert (finish.reason, finish.matched) == ("stop", stop)


async def test_abort_at_every_stage_leaves_nothing(driver: Driver) -> None:
    waiting = [driver.submit(driver.ids(STORY * 4), max_tokens=100) for _ in range(40)]
    await asyncio.sleep(0)
    for name, _ in waiting[30:]:
        driver.engine.abort(name)
    await waiting[0][1].first.wait()
    for name, _ in waiting[:30]:
        driver.engine.abort(name)
        driver.engine.abort(name)
    seen = [len(sink.deltas) for _, sink in waiting]
    await driver.idle()
    await asyncio.sleep(0.1)
    assert seen == [len(sink.deltas) for _, sink in waiting]
    assert not any(sink.done.is_set() for _, sink in waiting)
    name, sink = driver.submit(driver.ids(STORY), max_tokens=2)
    await sink.finished()
    driver.engine.abort(name)
    driver.engine.abort("never there")
    assert len((await driver.run(driver.ids(STORY), max_tokens=3)).token_ids) == 3


async def test_idle_costs_no_cpu(driver: Driver) -> None:
    await driver.run(driver.ids(STORY), max_tokens=2)
    await driver.idle()
    # The library computes one token ahead; that last step is still on its way.
    await asyncio.sleep(1.0)
    before = time.process_time()
    await asyncio.sleep(1.0)
    assert time.process_time() - before < 0.05


class Faulty:
    """A generator that does as it should until told otherwise."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.fault: Callable[[], None] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def next(self) -> Any:
        if self.fault is not None:
            self.fault()
        return self._inner.next()


async def faulty(
    demo_model: str, fault: Callable[[], None], **config: Any
) -> tuple[Driver, list[Collector]]:
    made: list[Faulty] = []

    def factory(model: Any, config: EngineConfig) -> Any:
        made.append(Faulty(make_generator(model, config)))
        return made[0]

    driver = await started(EngineConfig(demo_model, **config), factory)
    sinks = [driver.submit(driver.ids(STORY), max_tokens=4000)[1] for _ in range(3)]
    await sinks[0].first.wait()
    made[0].fault = fault
    return driver, sinks


def raise_error() -> None:
    raise ValueError("a fault")


def end_thread() -> None:
    raise SystemExit


@pytest.mark.parametrize("fault", [raise_error, end_thread])
async def test_a_fault_in_the_loop_fails_all_at_once(
    demo_model: str, fault: Callable[[], None], caplog: pytest.LogCaptureFixture
) -> None:
    driver, sinks = await faulty(demo_model, fault)
    reason = await asyncio.wait_for(driver.engine.dead, 10)
    assert isinstance(reason, EngineDead)
    assert "\n" not in reason.message
    assert all(sink.error is reason for sink in sinks)
    with pytest.raises(EngineDead):
        driver.submit([1, 2, 3])
    assert [r.exc_info is not None for r in caplog.records if r.levelname == "ERROR"] == [True]
    await driver.engine.close()


async def test_a_stall_is_noticed(demo_model: str) -> None:
    release = threading.Event()
    driver, sinks = await faulty(demo_model, lambda: release.wait(60) and None, stall_timeout_s=1.0)
    began = time.monotonic()
    reason = await asyncio.wait_for(driver.engine.dead, 30)
    assert time.monotonic() - began >= 0.9
    assert "no step" in reason.message
    assert all(sink.error is reason for sink in sinks)
    release.set()
    await driver.engine.close()


async def test_close_is_in_order_and_fails_what_is_left(demo_model: str) -> None:
    driver = await started(EngineConfig(demo_model))
    _, sink = driver.submit(driver.ids(STORY), max_tokens=4000)
    await sink.first.wait()
    await driver.engine.close()
    assert sink.error is not None
    assert not driver.engine.dead.done()
    assert not driver.engine.thread_alive
    assert not any(t.name == "mlx-step" for t in threading.enumerate())


async def test_a_missing_model_is_one_line() -> None:
    for name in ("/nowhere/at/all", "no-such-org/no-such-model"):
        engine = MlxEngine(EngineConfig(name))
        with pytest.raises(StartError) as caught:
            await engine.start()
        assert name in caught.value.message
        assert "\n" not in caught.value.message


async def test_start_can_be_cancelled(demo_model: str) -> None:
    engine = MlxEngine(EngineConfig(demo_model))
    task = asyncio.ensure_future(engine.start())
    await asyncio.sleep(0.3)
    task.cancel()
    began = time.monotonic()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert time.monotonic() - began < 1
    await engine.close()
    assert not engine.thread_alive

from __future__ import annotations

import asyncio
import gc
import itertools
import logging
from typing import Any

import pytest
from tests.support.fake_engine import FakeEngine, FakeRequest

from smg_grpc_servicer.serving.deltas import ABORT, LENGTH, STOP, Delta, Finish, Logprobs
from smg_grpc_servicer.serving.generation import Generation, Generations
from smg_grpc_servicer.serving.health import Health, State
from smg_wire.errors import DuplicateRequest, EngineDead, Overloaded, SmgError, Unavailable
from smg_wire.observability import WorkerMetrics


class Bench:
    """Generations without an engine: what would be aborted is noted."""

    def __init__(
        self,
        *,
        slots: int = 4,
        max_queued: int = 4,
        serving: bool = True,
        speaks_last: bool = False,
    ) -> None:
        self.aborted: list[str] = []
        self.metrics = WorkerMetrics("fake")
        self.health = Health()
        if serving:
            self.health.to(State.SERVING)
        self.generations = Generations(
            health=self.health,
            metrics=self.metrics,
            abort_engine=self.aborted.append,
            slots=slots,
            max_queued=max_queued,
            engine_speaks_last=speaks_last,
        )

    def open(self, request_id: str = "r", choices: int = 1) -> Generation:
        return self.generations.open(request_id, choices=choices)

    def sample(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(f"smg_worker_{name}", labels) or 0.0


@pytest.fixture
def bench() -> Bench:
    return Bench()


def token(index: int, token_id: int, count: int, finish: str | None = None) -> Delta:
    return Delta(index, [token_id], 3, count, finish=Finish(finish) if finish else None)


async def read(generation: Generation) -> list[Delta]:
    return [delta async for delta in generation]


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


# Reading.


async def test_deltas_come_out_one_by_one_for_a_reader_that_keeps_up(bench: Bench) -> None:
    async with bench.open() as generation:
        reader = asyncio.ensure_future(read(generation))
        for count in (1, 2, 3):
            await settle()
            generation.push(token(0, count, count, LENGTH if count == 3 else None))
        deltas = await reader
    assert [delta.token_ids for delta in deltas] == [[1], [2], [3]]
    assert [delta.finish is not None for delta in deltas] == [False, False, True]


async def test_deltas_that_meet_are_merged_with_their_logprobs(bench: Bench) -> None:
    async with bench.open() as generation:
        for count in (1, 2, 3):
            delta = token(0, count, count, LENGTH if count == 3 else None)
            delta.logprobs = Logprobs([count], [-float(count)], [[]])
            generation.push(delta)
        (delta,) = await read(generation)
    assert delta.token_ids == [1, 2, 3]
    assert delta.completion_tokens == 3
    assert delta.logprobs == Logprobs([1, 2, 3], [-1.0, -2.0, -3.0], [[], [], []])
    assert delta.finish == Finish(LENGTH)


async def test_a_delta_that_was_read_does_not_change_afterwards(bench: Bench) -> None:
    async with bench.open() as generation:
        generation.push(token(0, 1, 1))
        first = await generation.__anext__()
        generation.push(token(0, 2, 2, STOP))
        assert first.token_ids == [1]
        assert (await generation.__anext__()).token_ids == [2]


async def test_choices_interleave_and_each_ends_once(bench: Bench) -> None:
    async with bench.open(choices=3) as generation:
        reader = asyncio.ensure_future(read(generation))
        for count in (1, 2):
            for index in (2, 0, 1):
                await settle()
                generation.push(token(index, 10 * index + count, count, [None, STOP][count - 1]))
        deltas = await reader
    for index in range(3):
        mine = [delta for delta in deltas if delta.index == index]
        assert [t for delta in mine for t in delta.token_ids] == [10 * index + 1, 10 * index + 2]
        assert [bool(delta.finish) for delta in mine] == [False, True]
    assert bench.aborted == []


async def test_a_unary_answer_has_each_choice_whole_and_in_order(bench: Bench) -> None:
    async with bench.open(choices=2) as generation:
        collected = asyncio.ensure_future(generation.collect())
        for index, count, finish in ((1, 1, None), (0, 1, LENGTH), (1, 2, LENGTH)):
            generation.push(token(index, 10 * index + count, count, finish))
            await settle()
        assert [delta.token_ids for delta in await collected] == [[1], [11, 12]]


async def test_a_slow_reader_holds_one_message_a_choice_however_much_comes(bench: Bench) -> None:
    async with bench.open(choices=2) as generation:
        for count in range(1, 1001):
            for index in (0, 1):
                generation.push(token(index, count, count, LENGTH if count == 1000 else None))
        deltas = await read(generation)
    assert [len(delta.token_ids) for delta in deltas] == [1000, 1000]


# Ends.


async def test_a_finished_request_is_not_aborted(bench: Bench) -> None:
    async with bench.open() as generation:
        generation.push(token(0, 1, 1, STOP))
        await read(generation)
    assert bench.aborted == []
    assert bench.generations.in_flight == 0


async def test_abort_ends_every_open_choice_with_what_it_has(bench: Bench) -> None:
    async with bench.open(choices=3) as generation:
        generation.push(token(0, 1, 1, STOP))
        generation.push(token(1, 2, 1))
        assert bench.generations.abort(["r"]) == [True]
        deltas = {delta.index: delta for delta in await read(generation)}
    reasons = {index: delta.finish.reason for index, delta in deltas.items() if delta.finish}
    assert reasons == {0: STOP, 1: ABORT, 2: ABORT}
    assert deltas[1].token_ids == [2]
    assert deltas[1].completion_tokens == 1
    assert deltas[2].token_ids == []
    assert bench.aborted == [generation.engine_id]


async def test_an_abort_keeps_the_counts_of_tokens_that_were_read_before(bench: Bench) -> None:
    async with bench.open() as generation:
        generation.push(Delta(0, [1, 2], 3, 2, 1))
        await generation.__anext__()
        bench.generations.abort(["r"])
        (last,) = await read(generation)
    assert (last.prompt_tokens, last.completion_tokens, last.cached_tokens) == (3, 2, 1)


async def test_an_abort_wakes_a_reader_at_once(bench: Bench) -> None:
    async with bench.open() as generation:
        reader = asyncio.ensure_future(generation.collect())
        await settle()
        bench.generations.abort(["r"])
        (delta,) = await asyncio.wait_for(reader, 1)
        assert delta.finish == Finish(ABORT)


async def test_what_the_engine_says_after_an_end_is_dropped(bench: Bench) -> None:
    async with bench.open(choices=2) as generation:
        generation.push(token(0, 1, 1, STOP))
        generation.push(token(0, 2, 2, LENGTH))
        bench.generations.abort(["r"])
        generation.push(token(1, 3, 1))
        generation.fail(SmgError("late"))
        deltas = await read(generation)
    assert [delta.token_ids for delta in deltas] == [[1], []]
    assert bench.sample("generation_tokens_total") == 1


async def test_an_engine_that_speaks_last_gives_what_it_held_back() -> None:
    bench = Bench(speaks_last=True)
    async with bench.open(choices=2) as generation:
        assert bench.generations.abort(["r"]) == [True]
        assert generation.aborting
        assert not generation.over
        # The id is free, and the engine is told once, whatever it still has to say.
        assert bench.generations.abort(["r"]) == [False]
        assert bench.aborted == [generation.engine_id]
        generation.push(Delta(1, [5, 6], 3, 2, finish=Finish(ABORT)))
        generation.close_aborted()
        first, second = await generation.collect()
    assert (first.token_ids, first.finish) == ([], Finish(ABORT))
    assert (second.token_ids, second.finish) == ([5, 6], Finish(ABORT))
    assert bench.aborted == [generation.engine_id]
    assert bench.sample("requests_total", finish_reason=ABORT) == 1


async def test_only_an_aborted_request_is_closed_as_one() -> None:
    bench = Bench(speaks_last=True)
    async with bench.open() as generation:
        generation.close_aborted()
        assert not generation.over
        generation.push(token(0, 1, 1, STOP))
        (delta,) = await read(generation)
    assert delta.finish == Finish(STOP)


async def test_an_engine_that_dies_before_its_last_words_fails_the_request() -> None:
    bench = Bench(speaks_last=True)
    async with bench.open() as generation:
        bench.generations.abort(["r"])
        bench.generations.fail_all(EngineDead("dead"))
        with pytest.raises(EngineDead):
            await read(generation)


async def test_aborting_twice_or_what_is_not_there_does_nothing(bench: Bench) -> None:
    async with bench.open() as generation:
        assert bench.generations.abort(["unknown", "r", "r"]) == [False, True, False]
        assert bench.generations.abort(["r"]) == [False]
        assert bench.aborted == [generation.engine_id]


async def test_a_request_that_has_ended_is_not_there_to_abort(bench: Bench) -> None:
    async with bench.open() as generation:
        generation.push(token(0, 1, 1, STOP))
        assert bench.generations.abort(["r"]) == [False]
        (delta,) = await read(generation)
    assert delta.finish == Finish(STOP)
    assert bench.aborted == []


async def test_a_cancelled_reader_aborts_the_engine_exactly_once(bench: Bench) -> None:
    async def reads() -> None:
        async with bench.open() as generation:
            generation.push(token(0, 1, 1))
            await read(generation)

    task = asyncio.ensure_future(reads())
    await settle()
    assert bench.generations.in_flight == 1
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(bench.aborted) == 1
    assert bench.generations.in_flight == 0
    assert bench.sample("requests_total", finish_reason="cancel") == 1


async def test_leaving_early_by_an_error_aborts_the_engine_exactly_once(bench: Bench) -> None:
    with pytest.raises(RuntimeError):
        async with bench.open():
            raise RuntimeError
    assert len(bench.aborted) == 1
    assert bench.sample("requests_total", finish_reason="error") == 1


async def test_a_cancel_after_an_abort_does_not_abort_again(bench: Bench) -> None:
    async def ends() -> None:
        async with bench.open():
            bench.generations.abort(["r"])
            raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        await ends()
    assert len(bench.aborted) == 1
    assert bench.sample("requests_total", finish_reason=ABORT) == 1


async def test_what_came_before_a_failure_is_read_before_it(bench: Bench) -> None:
    async with bench.open() as generation:
        generation.push(token(0, 1, 1))
        generation.fail(SmgError("the engine refuses"))
        assert (await generation.__anext__()).token_ids == [1]
        with pytest.raises(SmgError, match="the engine refuses"):
            await generation.__anext__()


async def test_a_failure_reaches_a_unary_reader_and_the_engine_is_left_alone(bench: Bench) -> None:
    async with bench.open() as generation:
        waiting = asyncio.ensure_future(generation.collect())
        await settle()
        generation.fail(SmgError("the engine refuses"))
        with pytest.raises(SmgError, match="refuses"):
            await waiting
    assert bench.aborted == []
    assert bench.generations.in_flight == 0


async def test_the_first_failure_is_the_one_that_is_told(bench: Bench) -> None:
    async with bench.open() as generation:
        generation.fail(SmgError("first"))
        generation.fail(SmgError("second"))
        with pytest.raises(SmgError, match="first"):
            await generation.collect()


async def test_when_the_engine_dies_every_reader_fails_and_nothing_is_aborted(
    bench: Bench,
) -> None:
    async def collects(request_id: str) -> Any:
        async with bench.open(request_id) as generation:
            return await generation.collect()

    readers = [asyncio.ensure_future(collects(str(n))) for n in range(4)]
    await settle()
    bench.generations.fail_all(EngineDead("gone"))
    results = await asyncio.gather(*readers, return_exceptions=True)
    assert [type(result) for result in results] == [EngineDead] * 4
    assert bench.aborted == []


async def test_requests_that_a_drain_cuts_are_aborted_in_the_engine(bench: Bench) -> None:
    async with bench.open() as generation:
        bench.generations.cut_all(Unavailable("too late"))
        bench.generations.cut_all(Unavailable("again"))
        with pytest.raises(Unavailable, match="too late"):
            await generation.collect()
    assert bench.aborted == [generation.engine_id]


async def test_a_drain_does_not_cut_an_answer_that_only_waits_to_be_read(bench: Bench) -> None:
    async with bench.open() as generation:
        generation.push(token(0, 1, 1, STOP))
        bench.generations.cut_all(Unavailable("too late"))
        assert len(await read(generation)) == 1
    assert bench.aborted == []


async def test_drained_waits_for_the_last_message_and_not_only_for_the_engine(
    bench: Bench,
) -> None:
    async with bench.open() as generation:
        drained = asyncio.ensure_future(bench.generations.drained())
        generation.push(token(0, 1, 1, STOP))
        await settle()
        assert not drained.done()
        assert bench.generations.in_flight == 1
    await asyncio.wait_for(drained, 1)


# Ids.


async def test_a_live_id_is_refused_and_the_first_request_goes_on(bench: Bench) -> None:
    async with bench.open("same") as first:
        with pytest.raises(DuplicateRequest, match="same"):
            bench.open("same")
        first.push(token(0, 1, 1, STOP))
        assert [delta.token_ids for delta in await read(first)] == [[1]]
    assert bench.aborted == []


async def test_an_id_is_free_as_soon_as_its_last_token_is_out(bench: Bench) -> None:
    async with bench.open("same") as first:
        first.push(token(0, 1, 1, STOP))
        async with bench.open("same") as second:
            assert bench.generations.in_flight == 2
            second.push(token(0, 2, 1, STOP))
            assert [delta.token_ids for delta in await read(second)] == [[2]]
        assert [delta.token_ids for delta in await read(first)] == [[1]]


async def test_an_id_is_free_as_soon_as_it_is_aborted_and_stays_its_new_owners(
    bench: Bench,
) -> None:
    first = bench.open("same")
    bench.generations.abort(["same"])
    second = bench.open("same")
    async with first:
        await read(first)
    with pytest.raises(DuplicateRequest):
        bench.open("same")
    assert bench.generations.abort(["same"]) == [True]
    assert bench.aborted == [first.engine_id, second.engine_id]


async def test_an_id_and_its_place_are_free_as_soon_as_the_engine_refuses_it() -> None:
    bench = Bench(slots=1, max_queued=0)
    bench.open("same").fail(SmgError("the engine refuses"))
    assert bench.open("same").request_id == "same"


async def test_empty_ids_are_named_and_do_not_collide(bench: Bench) -> None:
    first, second = bench.open(""), bench.open("")
    assert first.request_id
    assert first.request_id != second.request_id
    assert bench.generations.abort([""]) == [False]
    assert bench.generations.abort([first.request_id]) == [True]


async def test_engine_ids_are_unique_and_none_is_a_prefix_of_another() -> None:
    bench = Bench(slots=2000)
    ids = sorted(bench.open(str(n)).engine_id for n in range(1500))
    assert len(set(ids)) == 1500
    # Sorted, a prefix would stand right before what it begins.
    assert not any(later.startswith(earlier) for earlier, later in itertools.pairwise(ids))


async def test_one_client_id_gets_a_new_engine_id_each_time(bench: Bench) -> None:
    first = bench.open("same")
    bench.generations.abort(["same"])
    assert bench.open("same").engine_id != first.engine_id


# Admission.


async def test_a_full_queue_is_refused_with_its_numbers_before_the_engine() -> None:
    bench = Bench(slots=2, max_queued=1)
    held = [bench.open(str(n)) for n in range(3)]
    with pytest.raises(Overloaded) as caught:
        bench.open("one too many")
    assert "3 sequences" in caught.value.message
    assert "--max-queued-requests 1" in caught.value.message
    assert bench.aborted == []
    held[0].push(token(0, 1, 1, STOP))
    bench.open("now there is room")


async def test_each_choice_takes_a_place() -> None:
    bench = Bench(slots=4, max_queued=0)
    bench.open("wide", choices=3)
    with pytest.raises(Overloaded):
        bench.open("wide too", choices=2)
    bench.open("narrow", choices=1)


async def test_a_request_wider_than_everything_is_served_alone() -> None:
    bench = Bench(slots=2, max_queued=0)
    wide = bench.open("wide", choices=5)
    with pytest.raises(Overloaded):
        bench.open("next")
    bench.generations.abort(["wide"])
    assert wide.choices == 5
    bench.open("next")


async def test_no_queue_at_all_is_a_limit_too() -> None:
    bench = Bench(slots=1, max_queued=0)
    bench.open("a")
    with pytest.raises(Overloaded, match="--max-queued-requests 0"):
        bench.open("b")


@pytest.mark.parametrize("state", [State.STARTING, State.WARMING, State.DRAINING, State.DEAD])
async def test_only_a_serving_worker_admits(state: State) -> None:
    bench = Bench(serving=False)
    bench.health.to(state)
    with pytest.raises(Unavailable) as caught:
        bench.open()
    assert isinstance(caught.value, EngineDead) == (state is State.DEAD)
    assert state.label in caught.value.message
    assert bench.generations.in_flight == 0


# Metrics and resources.


async def test_a_request_is_counted_in_every_family(bench: Bench) -> None:
    async with bench.open() as generation:
        assert bench.sample("requests_in_flight") == 1
        generation.push(Delta(0, [1], 5, 1, 4))
        generation.push(Delta(0, [2, 3], 5, 3, 4, finish=Finish(STOP)))
        await read(generation)
    assert bench.sample("requests_in_flight") == 0
    assert bench.sample("requests_total", finish_reason=STOP) == 1
    assert bench.sample("prompt_tokens_total") == 5
    assert bench.sample("cached_tokens_total") == 4
    assert bench.sample("generation_tokens_total") == 3
    assert bench.sample("time_to_first_token_seconds_count") == 1
    assert bench.sample("inter_token_latency_seconds_count") == 1
    assert bench.sample("request_duration_seconds_count") == 1


async def test_the_prompt_of_many_choices_is_counted_once(bench: Bench) -> None:
    async with bench.open(choices=2) as generation:
        for index in (0, 1):
            generation.push(Delta(index, [1], 5, 1, 4, finish=Finish(LENGTH)))
        await read(generation)
    assert bench.sample("prompt_tokens_total") == 5
    assert bench.sample("time_to_first_token_seconds_count") == 1
    assert bench.sample("requests_total", finish_reason=LENGTH) == 1


async def test_a_thousand_requests_that_end_in_every_way_leave_nothing() -> None:
    engine = FakeEngine(slots=16)
    health = Health()
    health.to(State.SERVING)
    generations = Generations(
        health=health,
        metrics=WorkerMetrics("fake"),
        abort_engine=engine.abort,
        slots=16,
        max_queued=2000,
    )

    async def one(number: int) -> None:
        fault = "429" if number % 5 == 4 else ""
        plan = FakeRequest([number % 1000], max_tokens=3, fault=fault)
        async with generations.open(str(number)) as generation:
            engine.submit(generation.engine_id, plan, generation)
            if number % 5 == 1:
                generations.abort([str(number)])
            if number % 5 == 2:
                raise RuntimeError
            if number % 5 == 3:
                await generation.__anext__()
                return
            await generation.collect()

    tasks_before = len(asyncio.all_tasks())
    results = await asyncio.gather(*(one(n) for n in range(1000)), return_exceptions=True)
    await asyncio.wait_for(generations.drained(), 10)
    await settle()
    failures = [type(result) for result in results if result is not None]
    assert failures.count(RuntimeError) == 200
    assert failures.count(Overloaded) == 200
    assert len(failures) == 400
    assert engine.running == 0
    assert generations.in_flight == 0
    # Each was submitted once, and aborted at most once.
    assert len(engine.submitted) == len(set(engine.submitted)) == 1000
    assert len(engine.aborted) == len(set(engine.aborted)) == 600
    assert len(asyncio.all_tasks()) == tasks_before
    results.clear()
    gc.collect()
    assert sum(type(thing) is Generation for thing in gc.get_objects()) == 0


async def test_an_id_cannot_write_lines_of_its_own_into_the_log(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    async with bench.open("a\nERROR forged: \x1b[31m" + "x" * 1_000_000):
        pass
    (line,) = caplog.messages
    assert line.isprintable()
    assert len(line) < 200


async def test_an_engine_may_say_itself_when_the_first_token_came(bench: Bench) -> None:
    async with bench.open() as generation:
        generation.push(Delta(0, [1, 2], 3, 2, finish=Finish(STOP), first_token_seconds=1234.5))
        await read(generation)
    assert bench.sample("time_to_first_token_seconds_sum") == 1234.5

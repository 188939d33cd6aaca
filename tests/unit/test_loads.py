"""Loads: what is known, what is not, and what is 0."""

from __future__ import annotations

import pytest

from smg_grpc_servicer.loads import Capacity, LoadBoard, RankLoad, Step

WHOLE = Capacity(
    max_running=4, total_tokens=64 * 32, reserved_tokens=32, block_size=32, reports_steps=True
)
IDLE = Step(0, 0, 0.0)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def board(clock: Clock) -> LoadBoard:
    return LoadBoard({0: WHOLE}, clock=clock)


def load_of(board: LoadBoard, rank: int = 0) -> RankLoad:
    load = board.load(rank)
    assert load is not None
    return load


def test_an_engine_that_makes_no_statistics_is_unknown_and_not_idle() -> None:
    board = LoadBoard({0: Capacity(max_running=4)})
    board.forwarded(10)
    assert board.load(0) is None
    assert board.loads() == []


def test_a_rank_that_is_not_managed_here_is_unknown(board: LoadBoard) -> None:
    board.observe(3, Step(5, 5, 0.5))
    board.heard(3)
    assert board.load(3) is None
    assert [load.rank for load in board.loads()] == [0]


def test_an_engine_that_has_made_no_step_yet_is_idle(board: LoadBoard) -> None:
    load = load_of(board)
    assert (load.running, load.waiting, load.token_usage, load.gen_throughput) == (0, 0, 0.0, 0.0)
    assert (load.waiting_uncached_tokens, load.prefill_pending_tokens) == (0, 0)
    assert (load.total_tokens, load.used_tokens, load.max_running) == (2048, 0, 4)
    assert load.cache_hit_rate is None
    assert load.engine_silence_ms is None
    assert load.age_ms == 0


def test_the_engines_counts_are_reported(board: LoadBoard) -> None:
    board.observe(0, Step(3, 2, 0.25, active_usage=0.2))
    load = load_of(board)
    assert (load.running, load.waiting, load.token_usage) == (3, 2, 0.25)
    assert load.active_token_usage == 0.2


@pytest.mark.parametrize("blocks", range(64))
def test_used_tokens_are_of_whole_blocks_and_of_those_that_can_be_used(
    board: LoadBoard, blocks: int
) -> None:
    board.observe(0, Step(1, 0, 1.0 - (63 - blocks) / 63))
    assert load_of(board).used_tokens == blocks * 32


def test_a_request_forwarded_after_the_engine_counted_waits(board: LoadBoard, clock: Clock) -> None:
    board.observe(0, Step(1, 0, 0.0))
    clock.now += 1
    forwarded = board.forwarded(100, sequences=2)
    assert load_of(board).waiting == 2
    clock.now += 1
    board.observe(0, Step(3, 0, 0.1))
    assert (load_of(board).running, load_of(board).waiting) == (3, 0)
    forwarded.ended()
    assert load_of(board).waiting == 0


def test_pending_prompts_are_work_in_hand_until_they_have_output_or_end(board: LoadBoard) -> None:
    first, second = board.forwarded(100), board.forwarded(50)
    assert load_of(board).prefill_pending_tokens == 150
    first.produced()
    first.produced()
    assert load_of(board).prefill_pending_tokens == 50
    second.ended()
    second.ended()
    second.produced()
    assert load_of(board).prefill_pending_tokens == 0


def test_the_last_prompts_are_the_ones_that_wait_less_what_the_cache_is_likely_to_serve(
    board: LoadBoard, clock: Clock
) -> None:
    for tokens in (1000, 30, 11):
        board.forwarded(tokens)
    clock.now += 1
    board.observe(0, Step(1, 2, 0.0))
    assert load_of(board).waiting_uncached_tokens == 41
    board.observe(0, Step(1, 2, 0.0, cache_requests=1, cache_queries=100, cache_hits=75))
    assert load_of(board).waiting_uncached_tokens == 11
    board.observe(0, Step(3, 0, 0.0))
    assert load_of(board).waiting_uncached_tokens == 0


def test_throughput_is_of_a_window_and_falls_to_nothing(board: LoadBoard, clock: Clock) -> None:
    board.observe(0, Step(1, 0, 0.1, generated_tokens=6))
    assert load_of(board).gen_throughput == 6.0
    for _ in range(4):
        clock.now += 1
        board.observe(0, Step(1, 0, 0.1, generated_tokens=6))
    assert load_of(board).gen_throughput == 30 / 4
    clock.now += 5.5
    assert load_of(board).gen_throughput == 0.0


def test_the_hit_rate_is_of_recent_requests_and_begins_anew_with_the_cache(
    board: LoadBoard,
) -> None:
    def queried(requests: int, hits: int, *, reset: bool = False) -> float | None:
        counts = {"cache_requests": requests, "cache_queries": requests * 10, "cache_hits": hits}
        board.observe(0, Step(0, 0, 0.0, cache_reset=reset, **counts))
        return load_of(board).cache_hit_rate

    assert queried(10, 50) == 0.5
    assert queried(0, 0) == 0.5
    assert queried(990, 0) == 50 / 10_000
    assert queried(990, 9900) == 1.0
    assert queried(0, 0, reset=True) is None
    assert queried(1, 0) == 0.0


def test_silence_is_counted_while_a_request_is_in_flight_and_from_its_forwarding(
    board: LoadBoard, clock: Clock
) -> None:
    board.observe(0, IDLE)
    clock.now += 60
    assert load_of(board).engine_silence_ms is None
    forwarded = board.forwarded(10)
    assert load_of(board).engine_silence_ms == 0
    clock.now += 2.5
    assert load_of(board).engine_silence_ms == 2500
    board.heard(0)
    clock.now += 0.25
    assert load_of(board).engine_silence_ms == 250
    forwarded.ended()
    assert load_of(board).engine_silence_ms is None


def test_a_request_that_is_quiet_while_healthy_counts_none_unless_steps_are_reported(
    clock: Clock,
) -> None:
    silent = LoadBoard({0: Capacity()}, clock=clock)
    silent.observe(0, IDLE)
    silent.forwarded(10, every_step=False)
    clock.now += 5
    assert load_of(silent).engine_silence_ms is None
    silent.forwarded(10)
    assert load_of(silent).engine_silence_ms == 0

    telling = LoadBoard({0: WHOLE}, clock=clock)
    telling.forwarded(10, every_step=False)
    clock.now += 5
    assert load_of(telling).engine_silence_ms == 5000


def test_a_sample_ages_only_while_the_engine_has_work(board: LoadBoard, clock: Clock) -> None:
    board.observe(0, Step(1, 0, 0.1))
    clock.now += 3
    assert load_of(board).age_ms == 0
    board.forwarded(10)
    clock.now += 1
    assert load_of(board).age_ms == 4000


def test_a_request_whose_rank_the_engine_chooses_makes_the_ranks_own_sums_unknown(
    clock: Clock,
) -> None:
    board = LoadBoard({4: WHOLE, 5: WHOLE}, clock=clock)
    placed = board.forwarded(100, rank=5)
    assert load_of(board, 4).prefill_pending_tokens == 0
    assert load_of(board, 5).prefill_pending_tokens == 100
    unplaced = board.forwarded(7)
    assert load_of(board, 4).prefill_pending_tokens is None
    assert load_of(board, 5).waiting_uncached_tokens is None
    unplaced.ended()
    placed.ended()
    assert [load.prefill_pending_tokens for load in board.loads()] == [0, 0]


def test_listeners_hear_of_each_rank_until_they_leave(board: LoadBoard) -> None:
    heard: list[int] = []
    leave = board.subscribe(heard.append)
    board.observe(0, IDLE)
    forwarded = board.forwarded(1)
    forwarded.produced()
    forwarded.ended()
    assert heard == [0, 0, 0, 0]
    leave()
    board.observe(0, IDLE)
    assert heard == [0, 0, 0, 0]

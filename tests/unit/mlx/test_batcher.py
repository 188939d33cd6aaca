from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from smg_grpc_servicer.mlx.batcher import Batcher
from smg_grpc_servicer.mlx.config import EngineConfig, MlxRequest
from smg_grpc_servicer.mlx.prefix_cache import PrefixCache
from smg_grpc_servicer.mlx.sampling import Sampling
from smg_grpc_servicer.serving.deltas import Delta, Finish
from smg_wire.errors import SmgError

if TYPE_CHECKING:
    import pytest

GREEDY = Sampling(temperature=0.0)


@dataclass
class Progress:
    uid: int
    progress: tuple[int, int]
    end_of_prompt: bool


@dataclass
class Response:
    uid: int
    token: int
    logprobs: Any = None


@dataclass
class FakeGenerator:
    """Reads a chunk of each prompt a step, then says 100, 101, 102, ..."""

    chunk: int = 10
    left: dict[int, int] = field(default_factory=dict)
    said: dict[int, int] = field(default_factory=dict)
    removed: list[list[int]] = field(default_factory=list)
    count: int = 0

    def insert(self, prompts: list[list[int]], **_: Any) -> list[int]:
        if prompts[0] == [13]:
            raise ValueError("unlucky")
        self.count += 1
        self.left[self.count] = len(prompts[0]) - 1
        return [self.count]

    def next(self) -> tuple[list[Progress], list[Response]]:
        responses = []
        for uid in self.said:
            self.said[uid] += 1
            responses.append(Response(uid, 99 + self.said[uid]))
        progress = []
        for uid, left in list(self.left.items()):
            if left == 0:
                del self.left[uid]
                self.said[uid] = 0
                progress.append(Progress(uid, (0, 0), True))
            else:
                self.left[uid] = max(0, left - self.chunk)
                progress.append(Progress(uid, (10**6 - self.left[uid] - 1, 10**6), False))
        return progress, responses

    def remove(self, uids: list[int], *, return_prompt_caches: bool) -> dict[int, Any]:
        assert not return_prompt_caches
        self.removed.append(uids)
        for uid in uids:
            assert (self.left.pop(uid, None) is None) != (self.said.pop(uid, None) is None)
        return {}


def request(length: int = 1, max_tokens: int = 3, stop: tuple[int, ...] = ()) -> MlxRequest:
    return MlxRequest(list(range(length)), GREEDY, max_tokens, frozenset(stop))


def batcher_of(generator: FakeGenerator, **config: Any) -> Batcher:
    return Batcher(generator, PrefixCache(0, print), EngineConfig("model", **config), 10)


def run(batcher: Batcher) -> dict[str, list[Delta]]:
    seen: dict[str, list[Delta]] = {}
    for _ in range(1000):
        if not batcher.busy:
            return seen
        results = batcher.admit() + batcher.step()
        for engine_id, result in results:
            assert isinstance(result, Delta)
            seen.setdefault(engine_id, []).append(result)
        batcher.retire()
    raise AssertionError("it does not end")


def test_a_request_ends_at_its_length() -> None:
    batcher = batcher_of(FakeGenerator())
    batcher.add("a", request(length=25))
    deltas = run(batcher)["a"]
    assert [d.token_ids for d in deltas] == [[100], [101], [102]]
    assert [d.completion_tokens for d in deltas] == [1, 2, 3]
    assert [d.finish for d in deltas] == [None, None, Finish("length")]
    assert {d.prompt_tokens for d in deltas} == {25}


def test_a_stop_token_ends_it_and_wins_over_the_length() -> None:
    batcher = batcher_of(FakeGenerator())
    batcher.add("a", request(max_tokens=2, stop=(101,)))
    deltas = run(batcher)["a"]
    assert deltas[-1].token_ids == [101]
    assert deltas[-1].finish == Finish("stop", 101)


def test_all_that_ended_in_a_step_leave_together() -> None:
    generator = FakeGenerator()
    batcher = batcher_of(generator)
    for name in "abc":
        batcher.add(name, request(stop=(100,) if name == "a" else ()))
    run(batcher)
    assert generator.removed == [[1], [2, 3]]
    assert not generator.left
    assert not generator.said


def test_the_batch_is_bounded_and_the_queue_keeps_its_order() -> None:
    batcher = batcher_of(FakeGenerator(), prefill_batch_size=2, completion_batch_size=3)
    for number in range(6):
        batcher.add(str(number), request(length=5))
    batcher.admit()
    assert (batcher.running, batcher.waiting) == (2, 4)
    batcher.step()
    batcher.step()
    batcher.admit()
    assert (batcher.running, batcher.waiting) == (3, 3)
    assert list(run(batcher)) == [str(number) for number in range(6)]


def test_an_aborted_request_is_gone_at_every_stage() -> None:
    generator = FakeGenerator()
    batcher = batcher_of(generator, prefill_batch_size=2)
    for name in ("reading", "generating", "waiting"):
        batcher.add(name, request(length=25 if name == "reading" else 1))
    batcher.admit()
    batcher.step()
    batcher.retire(["reading", "generating", "waiting", "unknown", "reading"])
    assert not batcher.busy
    assert not generator.left
    assert not generator.said
    batcher.retire(["generating"])


def test_an_abort_of_what_has_just_ended_is_harmless() -> None:
    batcher = batcher_of(FakeGenerator())
    batcher.add("a", request(max_tokens=1))
    batcher.admit()
    batcher.step()
    batcher.step()
    batcher.retire(["a"])
    assert not batcher.busy


def test_one_request_that_cannot_join_is_alone_in_that(caplog: pytest.LogCaptureFixture) -> None:
    batcher = batcher_of(FakeGenerator())
    batcher.add("bad", MlxRequest([13], GREEDY, 1, frozenset()))
    batcher.add("good", request())
    ((name, error),) = batcher.admit()
    assert name == "bad"
    assert isinstance(error, SmgError)
    assert "unlucky" not in error.message
    assert "unlucky" in caplog.text
    assert len(run(batcher)["good"]) == 3


def test_the_coming_step_counts_its_padding() -> None:
    batcher = batcher_of(FakeGenerator())
    assert batcher.coming_prefill_tokens == 0
    batcher.add("short", request(length=5))
    batcher.add("long", request(length=500))
    batcher.admit()
    assert batcher.coming_prefill_tokens == 2 * 10


def test_a_long_prompt_does_not_pad_many_short_ones() -> None:
    generator = FakeGenerator()
    batcher = batcher_of(generator)
    batcher.add("long", request(length=500))
    for number in range(4):
        batcher.add(f"short {number}", request(length=2))
    most = 0
    while batcher.waiting:
        batcher.admit()
        assert batcher.running
        most = max(most, batcher.coming_prefill_tokens)
        batcher.step()
        batcher.retire()
    assert most == 2 * 10
    assert generator.left[1] > 400, "the short ones waited for the long one"
    assert len(run(batcher)["long"]) == 3

from __future__ import annotations

from dataclasses import dataclass

from smg_grpc_servicer.serving.deltas import LENGTH, Delta, Finish, Logprobs


@dataclass
class Words:
    """An engine's extra."""

    text: str

    def merge(self, later: Words) -> None:
        self.text += later.text


def test_a_merged_delta_is_what_both_said() -> None:
    first = Delta(0, [1], 5, 1, 2, Logprobs([1], [-0.1], [[(1, -0.1)]]), extra=Words("a"))
    first.merge(Delta(0, [2, 3], 5, 3, 4, Logprobs([2, 3], [-0.2, -0.3], [[], []]), Finish(LENGTH)))
    assert first == Delta(
        0,
        [1, 2, 3],
        5,
        3,
        4,
        Logprobs([1, 2, 3], [-0.1, -0.2, -0.3], [[(1, -0.1)], [], []]),
        Finish(LENGTH),
        Words("a"),
    )


def test_extras_are_merged_by_the_engine_that_owns_them() -> None:
    first = Delta(0, [], 0, 0, extra=Words("a"))
    first.merge(Delta(0, [], 0, 0, extra=Words("b")))
    assert first.extra == Words("ab")


def test_an_extra_that_only_the_later_delta_has_is_kept() -> None:
    first = Delta(0, [], 0, 0)
    first.merge(Delta(0, [], 0, 0, extra=Words("b")))
    assert first.extra == Words("b")


def test_logprobs_that_only_the_later_delta_has_are_kept() -> None:
    first = Delta(0, [], 1, 0)
    first.merge(Delta(0, [9], 1, 1, logprobs=Logprobs([9], [-1.0], [[]])))
    assert first.logprobs == Logprobs([9], [-1.0], [[]])

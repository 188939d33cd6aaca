from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from tests.support.fake_vllm import completion, output

from smg_grpc_servicer.serving.deltas import Delta, Finish, Logprobs
from smg_grpc_servicer.vllm.constraints import Constraint
from smg_grpc_servicer.vllm.outputs import (
    Embedding,
    EmbeddingConverter,
    OutputConverter,
    PromptLogprobs,
    VllmExtra,
    logprobs,
    prompt_logprobs,
)
from smg_grpc_servicer.vllm.requests import Plan
from smg_wire.errors import ConstraintFailed, SmgError, Unavailable


def plan(
    *,
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
    **fields: Any,
) -> Plan:
    params = SimpleNamespace(logprobs=logprobs, prompt_logprobs=prompt_logprobs)
    return Plan(prompt_ids=[1, 2, 3], params=params, **fields)


def convert(converter: OutputConverter, *outputs: Any, aborting: bool = False) -> list[Delta]:
    return [d for one in outputs for d in converter.convert(one, aborting=aborting)]


def test_tokens_come_out_as_deltas_that_count_the_whole_choice() -> None:
    first, last = convert(
        OutputConverter(plan()),
        output(completion(token_ids=(5, 6))),
        output(completion(token_ids=(7,), finish_reason="length")),
    )
    assert first == Delta(0, [5, 6], 3, 2, 2)
    assert last == Delta(0, [7], 3, 3, 2, finish=Finish("length"), extra=VllmExtra())


def test_a_whole_answer_says_when_its_first_token_came() -> None:
    given = output(
        completion(token_ids=(5, 6), finish_reason="length"),
        metrics=SimpleNamespace(first_token_latency=0.25),
    )
    for streams, seconds in ((False, 0.25), (True, None)):
        (delta,) = convert(OutputConverter(plan(streams=streams)), given)
        assert delta.first_token_seconds == seconds
    (delta,) = convert(OutputConverter(plan()), output(completion(token_ids=(5,))))
    assert delta.first_token_seconds is None


def test_each_choice_is_counted_for_itself() -> None:
    deltas = convert(
        OutputConverter(plan(choices=2)),
        output(completion(1, (5, 6)), completion(0, (7,))),
        output(completion(1, (8,), "stop"), finished=False),
    )
    assert [(d.index, d.completion_tokens) for d in deltas] == [(1, 2), (0, 1), (1, 3)]


def test_a_delta_does_not_change_when_vllm_extends_its_own_list() -> None:
    given = completion(token_ids=(5,))
    (delta,) = convert(OutputConverter(plan()), output(given))
    given.token_ids.append(6)
    assert delta.token_ids == [5]


@pytest.mark.parametrize(
    ("stop_reason", "matched"), [(None, None), ("end", "end"), (9, 9), (8, None)]
)
def test_a_match_is_what_the_caller_named(
    stop_reason: int | str | None, matched: int | str | None
) -> None:
    # 8 is a second end-of-turn token, which vLLM adds to the caller's from the model's files.
    converter = OutputConverter(plan(named_stops=frozenset({9})))
    (delta,) = convert(converter, output(completion(0, (5,), "stop", stop_reason)))
    assert delta.finish == Finish("stop", matched)


def test_an_abort_that_was_asked_for_is_an_end_in_order() -> None:
    given = output(completion(0, (), "abort"))
    (delta,) = convert(OutputConverter(plan()), given, aborting=True)
    assert delta.finish == Finish("abort")


@pytest.mark.parametrize(
    ("reason", "fields", "kind", "status"),
    [
        ("abort", {}, Unavailable, "UNAVAILABLE"),
        ("error", {}, SmgError, "INTERNAL"),
        ("anything", {}, SmgError, "INTERNAL"),
        ("error", {"constraint": Constraint("regex", "a", False)}, ConstraintFailed, None),
        # With blocks to fetch it is more likely these that could not be had.
        (
            "error",
            {"constraint": Constraint("regex", "a", False), "moves_kv": True},
            SmgError,
            "INTERNAL",
        ),
    ],
)
def test_what_the_engine_ends_by_itself_is_no_completion(
    reason: str, fields: dict[str, Any], kind: type[SmgError], status: str | None
) -> None:
    with pytest.raises(kind) as caught:
        convert(OutputConverter(plan(**fields)), output(completion(0, (5,), reason)))
    assert caught.value.status.name == (status or "FAILED_PRECONDITION")


def test_the_end_brings_connector_parameters_and_speculation() -> None:
    # Of three drafted at each of four steps: none once, one twice, three once.
    metrics = SimpleNamespace(histogram=[1, 2, 0, 1], num_draft_tokens=12)
    given = output(
        completion(0, (5,), "length", spec_decode_metrics=metrics), kv_transfer_params={"a": 1}
    )
    (delta,) = convert(OutputConverter(plan()), given)
    assert delta.extra == VllmExtra(None, {"a": 1}, 5, 12)


def entry(value: float) -> SimpleNamespace:
    return SimpleNamespace(logprob=value)


def flat(*rows: list[tuple[int, float]]) -> SimpleNamespace:
    """FlatLogprobs: each row is the own token and then the best, the own one again among them."""
    starts, ends, ids, values = [], [], [], []
    for row in rows:
        starts.append(len(ids))
        ids += [token for token, _ in row]
        values += [value for _, value in row]
        ends.append(len(ids))
    return SimpleNamespace(start_indices=starts, end_indices=ends, token_ids=ids, logprobs=values)


FORMS = [
    # Token 5 is the best itself; token 6 is none of the two best.
    [{5: entry(-0.1), 7: entry(-2.0)}, {6: entry(-3.0), 8: entry(-0.5), 9: entry(-1.0)}],
    flat([(5, -0.1), (5, -0.1), (7, -2.0)], [(6, -3.0), (8, -0.5), (9, -1.0)]),
]


@pytest.mark.parametrize("given", FORMS, ids=["dicts", "flat"])
def test_alternatives_are_the_best_ones_best_first(given: Any) -> None:
    assert logprobs(given, [5, 6], 2) == Logprobs(
        [5, 6], [-0.1, -3.0], [[(5, -0.1), (7, -2.0)], [(8, -0.5), (9, -1.0)]]
    )


@pytest.mark.parametrize("given", [[{5: entry(-0.1)}], flat([(5, -0.1)])], ids=["dicts", "flat"])
def test_none_asked_is_the_chosen_token_alone(given: Any) -> None:
    assert logprobs(given, [5], 0) == Logprobs([5], [-0.1], [[]])


def test_all_asked_is_all_of_them() -> None:
    row = [(2, -5.0), *((token, -float(token)) for token in range(100))]
    (top,) = logprobs(flat(row), [2], -1).top
    assert top == row[1:]


@pytest.mark.parametrize("form", ["dicts", "flat"])
def test_the_prompts_first_token_has_no_logprob(form: str) -> None:
    given: Any = [None, {2: entry(-1.0), 9: entry(-0.5)}, {3: entry(-0.2), 8: entry(-4.0)}]
    if form == "flat":
        given = flat([], [(2, -1.0), (9, -0.5)], [(3, -0.2), (3, -0.2)])
    assert prompt_logprobs(given, [1, 2, 3], 1) == PromptLogprobs(
        [1, 2, 3], [None, -1.0, -0.2], [[], [(9, -0.5)], [(3, -0.2)]]
    )


def test_the_prompts_logprobs_come_once() -> None:
    first, last = convert(
        OutputConverter(plan(prompt_logprobs=0)),
        output(completion(token_ids=(5,)), prompt_logprobs=flat([], [(2, -1.0)], [(3, -2.0)])),
        output(completion(token_ids=(6,), finish_reason="length"), prompt_logprobs=[]),
    )
    assert first.extra == VllmExtra(PromptLogprobs([1, 2, 3], [None, -1.0, -2.0], [[], [], []]))
    assert last.extra == VllmExtra()
    first.merge(last)
    assert isinstance(first.extra, VllmExtra)
    assert first.extra.prompt_logprobs is not None


class Tensor:
    def __init__(self, *values: float) -> None:
        self._values = list(values)

    def flatten(self) -> Tensor:
        return self

    def tolist(self) -> list[float]:
        return self._values


def pooled(*values: float, error: Any = None) -> SimpleNamespace:
    return SimpleNamespace(
        prompt_token_ids=[1, 2],
        num_cached_tokens=0,
        outputs=SimpleNamespace(data=Tensor(*values)),
        finished=True,
        error=error,
    )


def test_a_vector_is_an_extra() -> None:
    (delta,) = EmbeddingConverter().convert(pooled(0.5, -0.5), aborting=False)
    assert delta == Delta(0, [], 2, 0, finish=Finish("stop"), extra=Embedding([0.5, -0.5]))


def test_a_vector_of_nothing_is_an_abort_of_vllms() -> None:
    with pytest.raises(Unavailable):
        EmbeddingConverter().convert(pooled(), aborting=False)
    (delta,) = EmbeddingConverter().convert(pooled(), aborting=True)
    assert delta.finish == Finish("abort")


@pytest.mark.parametrize(("retryable", "status"), [(True, "UNAVAILABLE"), (False, "INTERNAL")])
def test_a_pooling_error_says_whether_to_try_again(retryable: bool, status: str) -> None:
    error = SimpleNamespace(code="multimodal_cache_miss", message="lost", retryable=retryable)
    with pytest.raises(SmgError, match="lost") as caught:
        EmbeddingConverter().convert(pooled(error=error), aborting=False)
    assert caught.value.status.name == status

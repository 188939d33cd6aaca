from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest

from smg_grpc_servicer.serving import checks
from smg_wire.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Callable

NO_NUMBERS = [math.nan, math.inf, -math.inf]


def after(value: float) -> float:
    """The next 64-bit float: the first that is beyond a bound."""
    return math.nextafter(value, math.inf)


def before(value: float) -> float:
    return math.nextafter(value, -math.inf)


def temperature(field: str, value: float) -> float:
    return checks.number(field, value, 0.0, math.inf)


def min_p(field: str, value: float) -> float:
    return checks.number(field, value, 0.0, 1.0)


ACCEPTED: list[tuple[Callable[[str, float], float], float, float]] = [
    (checks.top_p, 0.0, 1.0),
    (checks.top_p, after(0.0), after(0.0)),
    (checks.top_p, 1.0, 1.0),
    (checks.repetition_penalty, 0.0, 1.0),
    (checks.repetition_penalty, after(0.0), after(0.0)),
    (checks.repetition_penalty, 3.4e38, 3.4e38),
    (checks.penalty, -2.0, -2.0),
    (checks.penalty, 0.0, 0.0),
    (checks.penalty, 2.0, 2.0),
    (temperature, 0.0, 0.0),
    (temperature, 3.4e38, 3.4e38),
    (min_p, 0.0, 0.0),
    (min_p, 1.0, 1.0),
]
REFUSED: list[tuple[Callable[[str, float], float], float, str]] = [
    (checks.top_p, before(0.0), "[0, 1]"),
    (checks.top_p, after(1.0), "[0, 1]"),
    (checks.repetition_penalty, before(0.0), "at least 0"),
    (checks.penalty, before(-2.0), "[-2, 2]"),
    (checks.penalty, after(2.0), "[-2, 2]"),
    (temperature, before(0.0), "at least 0"),
    (min_p, before(0.0), "[0, 1]"),
    (min_p, after(1.0), "[0, 1]"),
]


def _name(value: Any) -> str | None:
    return value.__name__ if callable(value) else None


@pytest.mark.parametrize(("check", "value", "result"), ACCEPTED, ids=_name)
def test_the_bounds_themselves_are_taken_and_zero_is_unset(
    check: Callable[[str, float], float], value: float, result: float
) -> None:
    assert check("field", value) == result


@pytest.mark.parametrize(("check", "value", "limit"), REFUSED, ids=_name)
def test_the_first_value_beyond_a_bound_is_refused(
    check: Callable[[str, float], float], value: float, limit: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check("params.field", value)
    assert caught.value.field == "params.field"
    assert caught.value.message.startswith("params.field is ")
    assert limit in caught.value.message


@pytest.mark.parametrize("value", NO_NUMBERS)
@pytest.mark.parametrize("check", sorted({row[0] for row in REFUSED}, key=_name), ids=_name)
def test_what_is_no_finite_number_is_refused_by_its_name(
    check: Callable[[str, float], float], value: float
) -> None:
    with pytest.raises(InvalidRequest, match=f"params.field is {value!r}:"):
        check("params.field", value)


@pytest.mark.parametrize("value", [3, 4, 5])
def test_an_integer_between_its_bounds_is_taken(value: int) -> None:
    assert checks.integer("n", value, 3, 5) == value


@pytest.mark.parametrize("value", [2, 6])
def test_an_integer_beyond_its_bounds_is_refused(value: int) -> None:
    with pytest.raises(InvalidRequest, match=rf"^n is {value}: must be in \[3, 5\]$"):
        checks.integer("n", value, 3, 5)


def test_an_integer_without_an_upper_bound_may_be_any() -> None:
    assert checks.integer("n", 2**63, 1) == 2**63
    with pytest.raises(InvalidRequest, match="at least 1"):
        checks.integer("n", 0, 1)


def test_a_large_bound_is_written_out_in_full() -> None:
    with pytest.raises(InvalidRequest, match="2147483647"):
        checks.integer("seed", 2**31, 0, 2**31 - 1)


def test_token_ids_from_the_first_to_the_last_of_the_vocabulary_are_taken() -> None:
    checks.token_ids("ids", [0, 99], vocab_size=100)
    checks.token_ids("ids", [], vocab_size=100)


@pytest.mark.parametrize("token_id", [-1, 100, 2**32 - 1])
def test_a_token_id_without_a_row_is_refused_with_its_place(token_id: int) -> None:
    with pytest.raises(InvalidRequest) as caught:
        checks.token_ids("ids", [5, token_id], vocab_size=100)
    assert caught.value.message == f"ids[1] is {token_id}: must be in [0, 99], the vocabulary"


def test_a_prompt_may_fill_the_context_but_for_one_token() -> None:
    assert checks.prompt_ids("ids", [1] * 9, vocab_size=100, context=10) == [1] * 9
    assert checks.prompt_ids("ids", [1], vocab_size=100, context=10) == [1]


@pytest.mark.parametrize("length", [10, 11])
def test_a_prompt_without_room_to_answer_is_refused_with_both_lengths(length: int) -> None:
    with pytest.raises(InvalidRequest) as caught:
        checks.prompt_ids("ids", [1] * length, vocab_size=100, context=10)
    assert f"{length} tokens" in caught.value.message
    assert "context of 10 tokens" in caught.value.message


def test_a_prompt_that_is_too_long_is_refused_before_it_is_copied() -> None:
    with pytest.raises(InvalidRequest, match="1000000000000 tokens"):
        checks.prompt_ids("ids", range(10**12), vocab_size=100, context=10)


def test_stop_ids_may_be_the_whole_vocabulary_and_no_more() -> None:
    assert checks.stop_token_ids("ids", range(100), vocab_size=100) == set(range(100))
    assert checks.stop_token_ids("ids", [], vocab_size=100) == frozenset()
    with pytest.raises(InvalidRequest, match="'101 ids': must hold at most 100"):
        checks.stop_token_ids("ids", [5] * 101, vocab_size=100)
    with pytest.raises(InvalidRequest, match=r"^ids\[1\] is 100"):
        checks.stop_token_ids("ids", [5, 100], vocab_size=100)


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="at least one"):
        checks.prompt_ids("ids", [], vocab_size=100, context=10)


def test_a_prompt_with_an_id_outside_the_vocabulary_is_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"ids\[2\] is 100"):
        checks.prompt_ids("ids", [1, 2, 100], vocab_size=100, context=10)


def test_biases_at_the_bounds_are_taken() -> None:
    assert checks.logit_bias("bias", {0: -100.0, 99: 100.0}, vocab_size=100) == {
        0: -100.0,
        99: 100.0,
    }


@pytest.mark.parametrize("token_id", [-1, 100])
def test_a_bias_for_an_id_outside_the_vocabulary_is_refused(token_id: int) -> None:
    with pytest.raises(InvalidRequest, match=f"bias key is {token_id}: .*99"):
        checks.logit_bias("bias", {token_id: 1.0}, vocab_size=100)


@pytest.mark.parametrize("value", [after(100.0), before(-100.0), *NO_NUMBERS])
def test_a_bias_beyond_the_bounds_is_refused_with_its_id(value: float) -> None:
    with pytest.raises(InvalidRequest, match=r"bias\[7\] is .*\[-100, 100\]"):
        checks.logit_bias("bias", {7: value}, vocab_size=100)


@pytest.mark.parametrize(("asked", "granted"), [(None, 6), (1, 1), (6, 6), (7, 6), (2**32 - 1, 6)])
def test_no_more_is_generated_than_the_context_has_left(asked: int | None, granted: int) -> None:
    assert checks.max_tokens("max", asked, prompt_tokens=4, context=10) == granted


def test_no_tokens_at_all_is_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"max is 0: .*at least 1"):
        checks.max_tokens("max", 0, prompt_tokens=4, context=10)


def test_a_prompt_without_an_answer_may_fill_the_context() -> None:
    for count, answers in ((8, False), (7, True)):
        ids = [1] * count
        found = checks.prompt_ids("ids", ids, vocab_size=2, context=8, answers=answers)
        assert found == ids
    for count, answers, words in ((9, False, "no longer than"), (8, True, "shorter than")):
        with pytest.raises(InvalidRequest, match=f"{words} the context of 8"):
            checks.prompt_ids("ids", [1] * count, vocab_size=2, context=8, answers=answers)


def test_stop_strings_are_few_and_short_and_not_empty() -> None:
    def checked(*values: str) -> list[str]:
        return checks.stop_strings("stop", values, most=2, most_characters=3)

    assert checked("abc", "d") == ["abc", "d"]
    assert checked() == []
    for values, words in (
        (("a", ""), r"stop\[1\] .*empty"),
        (("abcd",), r"stop\[0\] is 4 characters: must be at most 3"),
        (("a", "b", "c"), "stop is 3 strings: must be at most 2"),
    ):
        with pytest.raises(InvalidRequest, match=words):
            checked(*values)


def test_a_json_object_is_json_and_an_object() -> None:
    assert checks.json_object("field", '{"a": [1, null]}') == {"a": [1, None]}
    for text in ("", "{", "[1]", "null", '{"a": NaN}', '{"a": Infinity}', "[" * 100_000):
        with pytest.raises(InvalidRequest, match="field"):
            checks.json_object("field", text)

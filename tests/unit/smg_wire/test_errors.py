from __future__ import annotations

import asyncio
import math

import grpc
import pytest

from smg_wire import errors
from smg_wire.errors import InvalidRequest, SmgError, from_engine_code, to_status

Code = grpc.StatusCode

MAPPING: list[tuple[SmgError, grpc.StatusCode]] = [
    (SmgError("x"), Code.INTERNAL),
    (InvalidRequest("top_p", 2.0, "must be in [0, 1]"), Code.INVALID_ARGUMENT),
    (errors.MalformedMessage("x"), Code.INVALID_ARGUMENT),
    (errors.EngineRefusal("x"), Code.INVALID_ARGUMENT),
    (errors.UnsupportedField("n", "one choice only"), Code.INVALID_ARGUMENT),
    (errors.NotFound("x"), Code.NOT_FOUND),
    (errors.DuplicateRequest("id-1"), Code.ALREADY_EXISTS),
    (errors.Unauthenticated("x"), Code.UNAUTHENTICATED),
    (errors.FailedPrecondition("x"), Code.FAILED_PRECONDITION),
    (errors.ConstraintFailed("x"), Code.FAILED_PRECONDITION),
    (errors.Overloaded("x"), Code.RESOURCE_EXHAUSTED),
    (errors.DeadlineExceeded("x"), Code.DEADLINE_EXCEEDED),
    (errors.Unavailable("x"), Code.UNAVAILABLE),
    (errors.EngineDead("x"), Code.UNAVAILABLE),
    (errors.Unimplemented("x"), Code.UNIMPLEMENTED),
    (errors.OutOfRange("x"), Code.OUT_OF_RANGE),
    (errors.DataLoss("x"), Code.DATA_LOSS),
    (errors.SettingsError("x"), Code.INTERNAL),
    (errors.StartError("x"), Code.INTERNAL),
]


@pytest.mark.parametrize(
    ("error", "code"), MAPPING, ids=[type(error).__name__ for error, _ in MAPPING]
)
def test_each_error_has_its_status_and_keeps_its_text(
    error: SmgError, code: grpc.StatusCode
) -> None:
    status, message, _ = to_status(error)
    assert status is code
    assert message == str(error)
    assert message


def test_the_mapping_above_knows_every_error_of_the_tree() -> None:
    def tree(kind: type[SmgError]) -> set[type[SmgError]]:
        return {kind}.union(*(tree(child) for child in kind.__subclasses__()))

    of_module = {kind for kind in tree(SmgError) if kind.__module__ == "smg_wire.errors"}
    assert of_module == {type(error) for error, _ in MAPPING}


def test_the_tree_in_the_docstring_is_the_tree() -> None:
    assert errors.__doc__ is not None
    for error, code in MAPPING:
        line = next(
            line for line in errors.__doc__.splitlines() if type(error).__name__ in line.split()
        )
        if not isinstance(error, (errors.SettingsError, errors.StartError)):
            assert code.name in line


def test_only_a_failed_constraint_has_a_trailer() -> None:
    for error, _ in MAPPING:
        expected = (
            (("smg-constraint-failed", "engine"),)
            if isinstance(error, errors.ConstraintFailed)
            else ()
        )
        assert to_status(error)[2] == expected


@pytest.mark.parametrize(
    "stranger", [KeyError("password"), RuntimeError("/etc/secret"), MemoryError("0xdeadbeef")]
)
def test_the_text_of_a_stranger_is_hidden(stranger: Exception) -> None:
    status, message, trailers = to_status(stranger)
    assert status is Code.INTERNAL
    assert message == errors.INTERNAL_MESSAGE
    assert str(stranger.args[0]) not in message
    assert trailers == ()


def test_a_timeout_inside_is_the_deadline() -> None:
    assert to_status(TimeoutError())[0] is Code.DEADLINE_EXCEEDED


def test_asyncios_timeout_is_the_deadline_on_every_python() -> None:
    assert to_status(asyncio.TimeoutError())[0] is Code.DEADLINE_EXCEEDED


def test_an_error_without_text_still_says_something() -> None:
    assert to_status(errors.Overloaded())[1] == "Overloaded"


@pytest.mark.parametrize(
    ("code", "status"),
    [
        (400, Code.INVALID_ARGUMENT),
        (404, Code.NOT_FOUND),
        (408, Code.DEADLINE_EXCEEDED),
        (429, Code.RESOURCE_EXHAUSTED),
        (503, Code.UNAVAILABLE),
        (504, Code.DEADLINE_EXCEEDED),
        (500, Code.INTERNAL),
        (418, Code.INTERNAL),
        (0, Code.INTERNAL),
    ],
)
def test_an_engines_code_becomes_its_status(code: int, status: grpc.StatusCode) -> None:
    assert to_status(from_engine_code(code, "says the engine"))[:2] == (status, "says the engine")


def test_a_refusal_names_field_value_and_limit() -> None:
    error = InvalidRequest("sampling_params.top_p", 1.5, "must be in [0, 1]")
    assert error.message == "sampling_params.top_p is 1.5: must be in [0, 1]"
    assert error.field == "sampling_params.top_p"


def test_a_float_of_the_wire_is_shown_as_it_was_written() -> None:
    # 0.1 as a 32-bit float, read back as a 64-bit one.
    assert "is 0.1:" in InvalidRequest("f", 0.10000000149011612, "x").message


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_values_that_are_no_numbers_are_named(value: float) -> None:
    assert f"is {value!r}:" in InvalidRequest("f", value, "x").message


def test_a_long_value_is_not_repeated_in_full() -> None:
    message = InvalidRequest("text", "x" * 10_000, "too long").message
    assert len(message) < 200
    assert "…" in message
    assert "too long" in message


def test_a_refusal_is_one_line_whatever_the_caller_wrote() -> None:
    assert "\n" not in errors.DuplicateRequest("a\nb\r\nc").message
    assert "\n" not in InvalidRequest("f", "a\nb", "x").message

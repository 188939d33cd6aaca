"""Checks that every engine's requests share: the wire's zeros, ranges and vocabularies.

Each takes the field's name as it stands in the message, so that a refusal names what the caller
wrote, and returns the value that the engine gets. Ranges are those of every wire, see the
docstrings; what only one engine limits stays in that engine's `requests` module.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

from smg_wire.errors import InvalidRequest, Measure

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

DEFAULT_TEMPERATURE = 1.0
# OpenAI's bounds; a bias of 100 bans or forces a token.
MAX_LOGIT_BIAS = 100.0
MAX_PENALTY = 2.0


def number(field: str, value: float, low: float, high: float) -> float:
    """Return `value` if it is finite and in [low, high]; either bound may be infinite.

    Raises:
        InvalidRequest: it is not.
    """
    if not math.isfinite(value) or not low <= value <= high:
        raise InvalidRequest(field, value, _range(low, high))
    return value


def integer(field: str, value: int, low: int, high: int | None = None) -> int:
    """Return `value` if it is in [low, high].

    Raises:
        InvalidRequest: it is not.
    """
    if value < low or (high is not None and value > high):
        raise InvalidRequest(field, value, _range(low, math.inf if high is None else high))
    return value


def _range(low: float, high: float) -> str:
    if math.isinf(high):
        return f"must be a finite number of at least {low:g}"
    return f"must be in [{low:g}, {high:.17g}]"


def top_p(field: str, value: float) -> float:
    """Return top_p; 0 is the wire's unset, 1.0."""
    return number(field, value, 0.0, 1.0) or 1.0


def repetition_penalty(field: str, value: float) -> float:
    """Return the repetition penalty; 0 is the wire's unset, 1.0."""
    return number(field, value, 0.0, math.inf) or 1.0


def penalty(field: str, value: float) -> float:
    """Return a frequency or presence penalty."""
    return number(field, value, -MAX_PENALTY, MAX_PENALTY)


def prompt_ids(
    field: str, ids: Sequence[int], *, vocab_size: int, context: int, answers: bool = True
) -> list[int]:
    """Return the prompt as a list if it fits the model; one that `answers` needs room for a token.

    Give it the message's own field: a list of what is too long takes ten times its memory.

    Raises:
        InvalidRequest: it is empty, leaves no room to generate, or holds an id that the
            embedding table has no row for.
    """
    if not ids:
        raise InvalidRequest(field, ids, "must hold at least one token id")
    if len(ids) + answers > context:
        bound = "shorter than" if answers else "no longer than"
        raise InvalidRequest(
            field, Measure(f"{len(ids)} tokens"), f"must be {bound} the context of {context} tokens"
        )
    token_ids(field, ids, vocab_size=vocab_size)
    return list(ids)


def token_ids(field: str, ids: Sequence[int], *, vocab_size: int) -> None:
    """Check that every id has a row in the embedding table.

    Raises:
        InvalidRequest: one has not; the message names its place.
    """
    # On the event loop, for prompts of a hundred thousand ids: the place is sought if it is wanted.
    if not ids or (min(ids) >= 0 and max(ids) < vocab_size):
        return
    for place, token_id in enumerate(ids):
        if not 0 <= token_id < vocab_size:
            raise InvalidRequest(
                f"{field}[{place}]", token_id, f"must be in [0, {vocab_size - 1}], the vocabulary"
            )


def stop_token_ids(field: str, ids: Sequence[int], *, vocab_size: int) -> frozenset[int]:
    """Return the ids that end an output.

    Raises:
        InvalidRequest: an id is outside the vocabulary, or there are more than it has: reading
            what a message can hold would keep everybody else waiting for seconds.
    """
    if len(ids) > vocab_size:
        raise InvalidRequest(
            field, f"{len(ids)} ids", f"must hold at most {vocab_size}, the vocabulary"
        )
    token_ids(field, ids, vocab_size=vocab_size)
    return frozenset(ids)


def logit_bias(field: str, bias: Mapping[int, float], *, vocab_size: int) -> dict[int, float]:
    """Return the biases by token id.

    Raises:
        InvalidRequest: an id is outside the vocabulary, or a bias outside [-100, 100].
    """
    for token_id, value in bias.items():
        if not 0 <= token_id < vocab_size:
            raise InvalidRequest(
                f"{field} key", token_id, f"must be in [0, {vocab_size - 1}], the vocabulary"
            )
        number(f"{field}[{token_id}]", value, -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS)
    return dict(bias)


def stop_strings(
    field: str, values: Sequence[str], *, most: int, most_characters: int
) -> list[str]:
    """Return the stop strings.

    Raises:
        InvalidRequest: there are more than `most`, or one is empty or too long.
    """
    if len(values) > most:
        raise InvalidRequest(field, Measure(f"{len(values)} strings"), f"must be at most {most}")
    for place, value in enumerate(values):
        if not value:
            raise InvalidRequest(f"{field}[{place}]", value, "must not be empty")
        if len(value) > most_characters:
            raise InvalidRequest(
                f"{field}[{place}]",
                Measure(f"{len(value)} characters"),
                f"must be at most {most_characters} characters",
            )
    return list(values)


def json_object(field: str, text: str) -> dict[str, Any]:
    """Return the object that `text` holds.

    Raises:
        InvalidRequest: it is not JSON, or not an object.
    """
    try:
        value = json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(field, text, f"must be JSON ({error})") from error
    if not isinstance(value, dict):
        raise InvalidRequest(field, text, "must be a JSON object")
    return value


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def max_tokens(field: str, value: int | None, *, prompt_tokens: int, context: int) -> int:
    """Return how many tokens may be generated: never more than the context has left.

    Raises:
        InvalidRequest: it is 0.
    """
    left = context - prompt_tokens
    if value is None:
        return left
    return min(integer(field, value, 1), left)

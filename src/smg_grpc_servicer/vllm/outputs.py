"""vLLM's outputs -> deltas, and vLLM's ends of a request -> this project's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from smg_grpc_servicer.serving.deltas import ABORT, LENGTH, STOP, Delta, Finish, Logprobs
from smg_wire.errors import ConstraintFailed, SmgError, Unavailable, from_engine_code

if TYPE_CHECKING:
    from smg_grpc_servicer.vllm.requests import Plan


@dataclass(slots=True)
class PromptLogprobs:
    """Natural-log probabilities of the prompt's tokens; the first has none.

    `top[i]` holds the alternatives of token i as (token id, logprob), best first.
    """

    token_ids: list[int]
    values: list[float | None]
    top: list[list[tuple[int, float]]]


@dataclass(slots=True)
class VllmExtra:
    """What vLLM's wire carries beyond the others'; the last three come with a choice's end."""

    prompt_logprobs: PromptLogprobs | None = None
    kv_transfer_params: dict[str, Any] | None = None
    spec_accepted_tokens: int = 0
    spec_draft_tokens: int = 0

    def merge(self, later: VllmExtra) -> None:
        """Take in the extra of the delta that follows in the same choice."""
        self.prompt_logprobs = self.prompt_logprobs or later.prompt_logprobs
        self.kv_transfer_params = later.kv_transfer_params or self.kv_transfer_params
        self.spec_accepted_tokens = later.spec_accepted_tokens
        self.spec_draft_tokens = later.spec_draft_tokens


@dataclass(slots=True)
class Embedding:
    """The pooled vector of a prompt."""

    values: list[float]

    def merge(self, later: Embedding) -> None:
        """Keep the later vector: a request has one."""
        self.values = later.values


class OutputConverter:
    """Turns the `RequestOutput`s of one request into deltas.

    vLLM gives what is new (RequestOutputKind.DELTA) or one whole output at the end; in both
    cases the ids of successive outputs are those of the answer, each once.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._counts = [0] * plan.choices

    def convert(self, output: Any, *, aborting: bool) -> list[Delta]:
        """Return one delta a choice that the output speaks of.

        `aborting` tells an abort that was asked for from one of the engine's own.

        Raises:
            SmgError: the engine aborted or failed the request by itself.
        """
        return [self._delta(output, choice, aborting) for choice in output.outputs]

    def _delta(self, output: Any, choice: Any, aborting: bool) -> Delta:
        token_ids = list(choice.token_ids)
        index: int = choice.index
        self._counts[index] += len(token_ids)
        finish = None
        if choice.finish_reason is not None:
            finish = self._finish(choice, aborting)
        asked = self._plan.params.logprobs
        return Delta(
            index,
            token_ids,
            prompt_tokens=len(output.prompt_token_ids or ()),
            completion_tokens=self._counts[index],
            cached_tokens=output.num_cached_tokens or 0,
            logprobs=None if asked is None else logprobs(choice.logprobs, token_ids, asked),
            finish=finish,
            extra=self._extra(output, choice, finish),
            first_token_seconds=None if self._plan.streams else _first_token_seconds(output),
        )

    def _extra(self, output: Any, choice: Any, finish: Finish | None) -> VllmExtra | None:
        asked, given = self._plan.params.prompt_logprobs, None
        # One entry a prompt token; once given, vLLM gives an empty list.
        if asked is not None and output.prompt_logprobs:
            given = prompt_logprobs(output.prompt_logprobs, output.prompt_token_ids, asked)
        if finish is None:
            return None if given is None else VllmExtra(given)
        accepted, drafted = _speculation(getattr(choice, "spec_decode_metrics", None))
        return VllmExtra(given, output.kv_transfer_params, accepted, drafted)

    def _finish(self, choice: Any, aborting: bool) -> Finish:
        reason: str = choice.finish_reason
        if reason == ABORT and aborting:
            return Finish(ABORT)
        if reason in (STOP, LENGTH):
            return Finish(reason, self._matched(choice.stop_reason))
        raise self._error(reason)

    def _matched(self, stop_reason: int | str | None) -> int | str | None:
        # vLLM treats what generation_config names as stop tokens too; to the caller they are
        # ends of the turn, and an end of the turn matches nothing.
        if isinstance(stop_reason, int) and stop_reason not in self._plan.named_stops:
            return None
        return stop_reason

    def _error(self, reason: str) -> SmgError:
        if reason == ABORT:
            # A pause or a sleep of the engine, or its shutdown: another worker may serve it.
            return Unavailable("the engine aborted the request")
        if self._plan.constraint is not None and not self._plan.moves_kv:
            return ConstraintFailed(
                f"the engine could not keep {self._plan.constraint.field} and ended the request"
            )
        return SmgError(f"the engine ended the request with {reason!r}")


class EmbeddingConverter:
    """Turns the `PoolingRequestOutput` of one request into its delta."""

    def convert(self, output: Any, *, aborting: bool) -> list[Delta]:
        """Return the vector as the delta's extra, or the end of an aborted request.

        Raises:
            SmgError: the engine failed the request.
        """
        error = getattr(output, "error", None)
        if error is not None:
            raise from_engine_code(503 if error.retryable else 500, error.message)
        prompt_tokens = len(output.prompt_token_ids)
        if aborting:
            return [Delta(0, [], prompt_tokens, 0, finish=Finish(ABORT))]
        values = output.outputs.data.flatten().tolist()
        if not values:
            # vLLM's own abort of a pooling request is a vector of nothing.
            raise Unavailable("the engine aborted the request")
        return [
            Delta(
                0,
                [],
                prompt_tokens,
                0,
                output.num_cached_tokens or 0,
                finish=Finish(STOP),
                extra=Embedding(values),
            )
        ]


def logprobs(given: Any, token_ids: list[int], alternatives: int) -> Logprobs:
    """Return the entries of `token_ids`; `alternatives` is how many were asked for, -1 is all."""
    rows = [_row(given, place, alternatives) for place in range(len(token_ids))]
    return Logprobs(
        list(token_ids),
        [value for _, value, _ in rows],
        [top for _, _, top in rows],
    )


def prompt_logprobs(given: Any, token_ids: list[int], alternatives: int) -> PromptLogprobs:
    """Return an entry for each prompt token, the first one empty."""
    rows = [_row(given, place, alternatives) for place in range(1, len(token_ids))]
    return PromptLogprobs(
        list(token_ids),
        [None, *(value for _, value, _ in rows)],
        [[], *(top for _, _, top in rows)],
    )


def _row(given: Any, place: int, alternatives: int) -> tuple[int, float, list[tuple[int, float]]]:
    """Return a position's own token, its logprob, and the best alternatives, best first."""
    starts = getattr(given, "start_indices", None)
    if starts is None:
        # dict[int, Logprob]: the own token first, then the best that are not it.
        entries = [(token, entry.logprob) for token, entry in given[place].items()]
        own = entries[0]
        ranked = sorted(entries, key=lambda entry: -entry[1])
    else:
        # FlatLogprobs: the own token, then the best, among which it may be again.
        start, end = starts[place], given.end_indices[place]
        own = (given.token_ids[start], given.logprobs[start])
        ranked = list(
            zip(given.token_ids[start + 1 : end], given.logprobs[start + 1 : end], strict=True)
        )
    return own[0], own[1], ranked if alternatives == -1 else ranked[:alternatives]


def _first_token_seconds(output: Any) -> float | None:
    """Return what vLLM measured, unless it keeps no statistics."""
    latency: float | None = getattr(output.metrics, "first_token_latency", None)
    return latency or None


def _speculation(metrics: Any) -> tuple[int, int]:
    """Return (accepted, drafted) tokens; vLLM counts with --per-request-spec-decode-metrics."""
    if metrics is None:
        return 0, 0
    accepted = sum(length * count for length, count in enumerate(metrics.histogram))
    return accepted, metrics.num_draft_tokens

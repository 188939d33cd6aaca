"""What an answer must match: the six kinds of the wire -> vLLM's structured outputs.

Whether a regex, grammar or schema is well formed is for vLLM's own validator to say, which runs
when the request is handed over, off the event loop.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from smg_grpc_servicer.vllm.limits import MAX_CONSTRAINT_CHARACTERS
from smg_wire.errors import InvalidRequest, Measure, UnsupportedField

if TYPE_CHECKING:
    from smg_grpc_proto.generated import vllm_engine_pb2 as pb

    from smg_grpc_servicer.vllm.limits import Limits

# The wire's names -> those of vLLM's StructuredOutputsParams.
_KINDS = {
    "json_schema": "json",
    "regex": "regex",
    "grammar": "grammar",
    "structural_tag": "structural_tag",
    "json_object": "json_object",
    "choice": "choice",
}


@dataclass(frozen=True)
class Constraint:
    """One constraint: its field on the wire, and its value."""

    kind: str
    value: Any
    from_first_token: bool

    @property
    def field(self) -> str:
        """The field as it stands in the message."""
        return f"sampling_params.{self.kind}"


def read(params: pb.SamplingParams, limits: Limits) -> Constraint | None:
    """Return the constraint that is set, if one is.

    Raises:
        InvalidRequest: it is empty or too large.
        UnsupportedField: the engine has no tokenizer, or cannot start a grammar where asked.
    """
    kind = params.WhichOneof("constraint")
    if kind is None:
        return None
    value: Any = getattr(params, kind)
    if kind == "choice":
        value = list(value.choices)
    constraint = Constraint(kind, value, params.grammar_from_first_token)
    if not limits.has_tokenizer:
        raise UnsupportedField(constraint.field, "this worker runs without a tokenizer")
    if constraint.from_first_token and not limits.first_token_grammar:
        raise UnsupportedField(
            "sampling_params.grammar_from_first_token", "this release of vLLM has no such switch"
        )
    _check_size(constraint)
    return constraint


def _check_size(constraint: Constraint) -> None:
    field, value = constraint.field, constraint.value
    if constraint.kind == "json_object":
        if not value:
            raise InvalidRequest(field, value, "must be true where it is set")
        return
    if constraint.kind == "choice":
        if not value:
            raise InvalidRequest(f"{field}.choices", value, "must hold at least one choice")
        size = sum(map(len, value))
    else:
        size = len(value)
    if size > MAX_CONSTRAINT_CHARACTERS:
        raise InvalidRequest(
            field,
            Measure(f"{size} characters"),
            f"must be at most {MAX_CONSTRAINT_CHARACTERS} characters",
        )


def build(constraint: Constraint) -> Any:
    """Return vLLM's form of a constraint."""
    from vllm.sampling_params import StructuredOutputsParams

    return StructuredOutputsParams(**{_KINDS[constraint.kind]: constraint.value})

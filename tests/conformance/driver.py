"""What the conformance suite knows of an engine.

A newcomer writes one `Driver` (which process to start, and the facts that a test has to know)
and one `Client` (the engine's own wire, in the words of this module), and a test module that
imports the suite::

    from tests.conformance.suite import *
"""

from __future__ import annotations

import abc
import signal
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping, Sequence

    import grpc
    from tests.support.processes import Process

Metadata = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Params:
    """How to generate; None is absent on the wire."""

    max_tokens: int | None = 8
    temperature: float | None = 0.0
    seed: int | None = None
    logprobs: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = True
    top_p: float = 0.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    n: int = 1


@dataclass(frozen=True)
class TokenLogprobs:
    """One entry a token; `top` holds (token id, logprob), best first."""

    token_ids: list[int]
    values: list[float]
    top: list[list[tuple[int, float]]]


@dataclass(frozen=True)
class Event:
    """A message of a stream. Counts are of the whole choice so far."""

    index: int
    token_ids: list[int]
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    logprobs: TokenLogprobs | None


@dataclass(frozen=True)
class Chunk(Event):
    """New tokens of one choice."""


@dataclass(frozen=True)
class Complete(Event):
    """The end of one choice."""

    finish_reason: str
    matched: int | str | None


@dataclass(frozen=True)
class Capabilities:
    """What this engine's wire and this worker offer, and what a test must allow for.

    `abort_answers`: the Abort RPC says whether the request was live.
    `repeatable_logprobs`: how far two runs of one request may differ in a logprob.
    """

    n: bool = False
    string_stops: bool = False
    text_input: bool = False
    abort_answers: bool = False
    most_logprobs: int = 20
    repeatable_logprobs: float = 1e-3


@dataclass(frozen=True)
class Facts:
    """What a test has to know of the model. Prompts are ordinary, of different lengths, and
    their greedy answers are not sensitive to what else is in the batch. `decode` is there where
    the wire has string stops."""

    vocabulary: int
    context: int
    end_of_sequence: int
    prompts: Sequence[Sequence[int]]
    decode: Callable[[Sequence[int]], str] | None = None


@dataclass(frozen=True)
class Refusal:
    """A request of the engine's wire that must be refused, and what the refusal must name."""

    name: str
    request: Any
    words: tuple[str, ...]


class Call(abc.ABC):
    """A running Generate: iterate for its events; errors are grpc's own."""

    @abc.abstractmethod
    def __aiter__(self) -> AsyncIterator[Event]: ...

    @abc.abstractmethod
    def cancel(self) -> None: ...


class Client(abc.ABC):
    """The engine's wire."""

    @abc.abstractmethod
    def generate(
        self,
        prompt_ids: Sequence[int],
        params: Params,
        *,
        stream: bool = True,
        request_id: str = "",
        timeout: float | None = None,
    ) -> Call: ...

    @abc.abstractmethod
    def send(self, request: Any) -> Call:
        """Send a message of the wire as it is."""

    @abc.abstractmethod
    async def abort(self, request_id: str) -> bool | None:
        """Abort one request; None where the wire does not say whether it was live."""

    @abc.abstractmethod
    async def active(self) -> int:
        """Requests that the worker counts as live."""

    @abc.abstractmethod
    async def healthy(self) -> bool:
        """The engine's own health RPC."""

    @abc.abstractmethod
    async def served_model_name(self) -> str: ...

    @abc.abstractmethod
    async def tokenizer(self) -> list[tuple[bytes, str]]:
        """The chunks of GetTokenizer as (data, sha256)."""


class Driver(abc.ABC):
    """One engine."""

    name: str
    service: str
    capabilities: Capabilities
    served_model_name: str
    # How long a start may take, and how soon something that ends must have ended.
    boot_seconds: float = 120.0
    settle_seconds: float = 10.0

    @abc.abstractmethod
    def command(self) -> list[str]:
        """The worker's command line, without --port."""

    @abc.abstractmethod
    def breakable_command(self) -> list[str]:
        """The same worker in a harness that lets `break_engine` kill its engine."""

    def break_engine(self, worker: Process) -> None:
        """Have the engine of a worker, started by `breakable_command`, die at its next step."""
        worker.signal(signal.SIGUSR1)

    @abc.abstractmethod
    def slots(self, count: int) -> list[str]:
        """Options that let a worker run so many requests at once."""

    @property
    @abc.abstractmethod
    def facts(self) -> Facts: ...

    @abc.abstractmethod
    def client(self, channel: grpc.aio.Channel, metadata: Metadata = ()) -> Client: ...

    @abc.abstractmethod
    def refusals(self) -> list[Refusal]:
        """The bad-input table: every field beyond each of its bounds."""

    def environment(self) -> dict[str, str]:
        """Variables for the worker's process."""
        return {}

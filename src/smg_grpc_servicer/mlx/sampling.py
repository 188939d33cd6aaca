"""How the next token is chosen, as functions that mlx-lm calls for each row of a batch.

They are written out and not compiled: compiled functions take every new temperature or penalty
for a new constant, compile it (with a C++ compiler on a CPU) and keep the result for good. They
leave the library's global random state alone, so what one request draws depends on its own
seed and on nothing that runs beside it.
"""

from __future__ import annotations

import math
import secrets
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import numpy as np

    Array = Any
    Sampler = Callable[[Array], Array]
    LogitsProcessor = Callable[[Array, Array], Array]

# Below this a temperature only divides by next to nothing; it means greedy.
GREEDY_BELOW = 1e-5

# Bounds for adjusted logits: far outside what a model says, and small enough that dividing by
# the smallest temperature still gives a finite 32-bit float.
_LOGIT_LIMIT = 1e30


@dataclass(frozen=True, slots=True)
class Sampling:
    """Checked sampling values; the defaults change nothing.

    Args:
        temperature: below 1e-5 is greedy.
        top_p: in (0, 1]; 1 is off.
        top_k: 0, or the size of the vocabulary and above, is off.
        min_p: in [0, 1]; 0 is off.
        repetition_penalty: above 0; 1 is off. Over prompt and output.
        frequency_penalty: in [-2, 2], over the output.
        presence_penalty: in [-2, 2], over the output.
        logit_bias: what is added to the logits of these ids.
        seed: makes the output repeatable; None draws one.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature < GREEDY_BELOW


def greedy(logprobs: Array) -> Array:
    """Return the most likely token of each row. logprobs: [rows, vocabulary]."""
    import mlx.core as mx

    return mx.argmax(logprobs, axis=-1)


def make_sampler(sampling: Sampling) -> Sampler | None:
    """Return a function from log probabilities [1, vocabulary] to a token [1].

    None is greedy, for which the batch has one function for all its rows. The order is
    temperature, top_k, top_p, min_p; each filter sees what the one before has left, and the
    most likely token passes all of them.
    """
    if sampling.greedy:
        return None
    import mlx.core as mx

    seed = secrets.randbits(64) if sampling.seed is None else sampling.seed
    key = mx.random.key(seed & 0xFFFF_FFFF_FFFF_FFFF)

    def sample(logprobs: Array) -> Array:
        nonlocal key
        key, now = mx.random.split(key)
        scaled = logprobs.astype(mx.float32)
        # The best token at zero: nothing overflows, whatever the temperature.
        scaled = scaled - mx.max(scaled, axis=-1, keepdims=True)
        if sampling.temperature != 1.0:
            scaled = scaled * (1.0 / sampling.temperature)
        top_k = sampling.top_k if 0 < sampling.top_k < scaled.shape[-1] else 0
        if not top_k and sampling.top_p >= 1.0:
            return mx.random.categorical(_min_p(scaled, sampling.min_p), key=now)
        tokens, scaled = _ranked(scaled, top_k)
        if sampling.top_p < 1.0:
            scaled = _top_p(scaled, sampling.top_p)
        chosen = mx.random.categorical(_min_p(scaled, sampling.min_p), key=now)
        return mx.take_along_axis(tokens, chosen[:, None], axis=-1)[:, 0]

    return sample


def _ranked(scaled: Array, top_k: int) -> tuple[Array, Array]:
    """Return tokens and values, both [1, n] and best first: the top_k best, or all for 0."""
    import mlx.core as mx

    if not top_k:
        tokens = mx.argsort(-scaled, axis=-1)
        return tokens, mx.take_along_axis(scaled, tokens, axis=-1)
    tokens = mx.argpartition(-scaled, kth=top_k - 1, axis=-1)[:, :top_k]
    values = mx.take_along_axis(scaled, tokens, axis=-1)
    order = mx.argsort(-values, axis=-1)
    return mx.take_along_axis(tokens, order, axis=-1), mx.take_along_axis(values, order, axis=-1)


def _top_p(ranked: Array, top_p: float) -> Array:
    """Keep the fewest best tokens whose probabilities reach top_p together."""
    import mlx.core as mx

    probabilities = mx.softmax(ranked, axis=-1)
    mass_before = mx.cumsum(probabilities, axis=-1, inclusive=False)
    # The best token has nothing before it; the maximum keeps it for a top_p of zero as well.
    return mx.where(mass_before < max(top_p, 1e-9), ranked, -math.inf)


def _min_p(scaled: Array, min_p: float) -> Array:
    """Drop what is less likely than min_p times the best token, which is at zero."""
    import mlx.core as mx

    if min_p <= 0.0:
        return scaled
    return mx.where(scaled < math.log(min(min_p, 1.0)), -math.inf, scaled)


class RawLogits:
    """A logits processor that keeps what the model said before others change it.

    The generator computes one token ahead, so the logits of a token are asked for while those
    of the next are here already.
    """

    def __init__(self) -> None:
        self._kept: deque[Array] = deque()

    def __call__(self, _tokens: Array, logits: Array) -> Array:
        """Keep the logits, [1, vocabulary], and pass them on."""
        self._kept.append(logits)
        return logits

    def take(self) -> Array:
        """Return the logits of the oldest token not asked for yet, [vocabulary]."""
        return self._kept.popleft()[0]


def make_logits_processors(sampling: Sampling, prompt_ids: Sequence[int]) -> list[LogitsProcessor]:
    """Return the functions that adjust logits [1, vocabulary], in the order of their use.

    Bias first, then repetition, frequency and presence penalties, as vLLM has it. They are for
    one request and keep its state: the first call is before its first token, and in each later
    one the last of `tokens` is the newest token of its output.
    """
    processors: list[LogitsProcessor] = []
    if sampling.logit_bias:
        processors.append(_Bias(sampling.logit_bias))
    if sampling.repetition_penalty != 1.0:
        processors.append(_RepetitionPenalty(sampling.repetition_penalty, prompt_ids))
    if sampling.frequency_penalty or sampling.presence_penalty:
        processors.append(_OutputPenalty(sampling.frequency_penalty, sampling.presence_penalty))
    return processors


def _finite(logits: Array) -> Array:
    import mlx.core as mx

    return mx.clip(logits, -_LOGIT_LIMIT, _LOGIT_LIMIT)


class _Bias:
    """Adds the request's bias to the logits that it names."""

    def __init__(self, bias: Mapping[int, float]) -> None:
        self._bias = bias
        self._row: Array = None

    def __call__(self, _tokens: Array, logits: Array) -> Array:
        import mlx.core as mx

        if self._row is None:
            row = _zeros(logits)
            for token, value in self._bias.items():
                # Outside of the row there is memory of others.
                if 0 <= token < row.shape[-1]:
                    row[0, token] = max(-_LOGIT_LIMIT, min(_LOGIT_LIMIT, value))
            self._row = mx.array(row)
        return _finite(logits.astype(mx.float32) + self._row)


class _RepetitionPenalty:
    """Makes every token of prompt and output less likely by a factor, or more below 1."""

    def __init__(self, penalty: float, prompt_ids: Sequence[int]) -> None:
        self._penalty = min(max(penalty, 1e-6), 1e6)
        self._prompt_ids = prompt_ids
        self._factors: Array = None

    def __call__(self, tokens: Array, logits: Array) -> Array:
        import mlx.core as mx
        import numpy as np

        if self._factors is None:
            row = _zeros(logits) + 1.0
            ids = np.asarray(self._prompt_ids, dtype=np.int64)
            row[0, ids[(ids >= 0) & (ids < row.shape[-1])]] = self._penalty
            self._factors = mx.array(row)
        else:
            self._factors[0, tokens[-1:]] = self._penalty
        logits = logits.astype(mx.float32)
        return _finite(mx.where(logits < 0, logits * self._factors, logits / self._factors))


class _OutputPenalty:
    """Takes from the logit of each token of the output, once and for each time it occurred."""

    def __init__(self, frequency: float, presence: float) -> None:
        self._frequency = frequency
        self._presence = presence
        self._counts: Array = None

    def __call__(self, tokens: Array, logits: Array) -> Array:
        import mlx.core as mx

        logits = logits.astype(mx.float32)
        if self._counts is None:
            self._counts = mx.array(_zeros(logits))
            return logits
        self._counts = self._counts.at[0, tokens[-1:]].add(1.0)
        if self._frequency:
            logits = logits - self._frequency * self._counts
        if self._presence:
            logits = logits - mx.where(self._counts > 0, self._presence, 0.0)
        return _finite(logits)


def _zeros(logits: Array) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return float32 zeros of the shape of the logits, [1, vocabulary]."""
    import numpy as np

    return np.zeros(logits.shape, dtype=np.float32)

"""Keeps each row of a batch with its own sampler and logits processors, on mlx-lm before 0.32.

Those releases take a batch in which no row has a sampler (or a processor) for one that has no
list of them: the list is not cut when rows leave it, or is filled with None. A row that joins
later is then sampled by another row's function, or fails. So the lists are written anew before
each step. Naming a function for every row instead would avoid that too, but has the batch
sliced into rows at every step, for a quarter more CPU with eight greedy rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from smg_grpc_servicer.mlx.sampling import LogitsProcessor, Sampler

    Align = Callable[[Any, Mapping[int, "RowFunctions"]], None]

# Where a sequence that waits in the generator keeps its sampler; its processors come next.
_SAMPLER_PLACE = 5


class RowFunctions(NamedTuple):
    """What chooses one row's tokens; no sampler is greedy."""

    sampler: Sampler | None
    processors: list[LogitsProcessor]


class _NoProcessors(list[Any]):
    """Empty, and true: in a batch where others have processors, None would take its place."""

    def __bool__(self) -> bool:
        return True


def probe_alignment() -> Align | None:
    """Return what aligns the lists of the installed mlx-lm, or None if it does so itself."""
    from mlx_lm import generate

    return None if hasattr(generate, "_normalize_samplers") else align


def align(generator: Any, rows: Mapping[int, RowFunctions]) -> None:
    """Write the lists of a `BatchGenerator` anew from the functions of its rows by uid."""
    some = any(functions.processors for functions in rows.values())
    none: list[LogitsProcessor] = _NoProcessors() if some else []
    for batch in (generator._prompt_batch, generator._generation_batch):
        batch.samplers = [rows[uid].sampler for uid in batch.uids]
        batch.logits_processors = [rows[uid].processors or none for uid in batch.uids]
    waiting = generator._unprocessed_sequences
    for place, sequence in enumerate(waiting):
        functions = rows[sequence[0]]
        waiting[place] = (
            *sequence[:_SAMPLER_PLACE],
            functions.sampler,
            functions.processors or none,
            *sequence[_SAMPLER_PLACE + 2 :],
        )

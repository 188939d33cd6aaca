"""Builds what the stepping thread steps: the model, its batch generator and its prefix cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from smg_grpc_servicer.mlx.sampling import greedy

if TYPE_CHECKING:
    from smg_grpc_servicer.mlx.config import EngineConfig
    from smg_grpc_servicer.mlx.sampling import LogitsProcessor, Sampler

_METAL_PREFILL_STEP = 2048
_CPU_PREFILL_STEP = 512

# Freed buffers that mlx may keep for itself. Without a limit it keeps as much as it ever used.
_ALLOCATOR_CACHE_BYTES = 256 << 20


class _NoProcessors(list[Any]):
    """Empty, and true: see `Compatibility`."""

    def __bool__(self) -> bool:
        return True


@dataclass(frozen=True, slots=True)
class Compatibility:
    """How to say "greedy" and "no processors" to the batch generator of this release.

    mlx-lm before 0.32 takes a batch in which no row has a sampler (or a processor) for one that
    has no list of them: the list is not cut when rows leave it, or is filled with None. A row
    that joins later is then sampled by another row's function, or fails. Telling it a function
    for every row avoids that; 0.32 fills in a function for each row itself and, where all rows
    have the same, calls it once for the whole batch.

    Args:
        explicit: whether every row must name its sampler and a list that counts as true.
    """

    explicit: bool = False

    def sampler(self, sampler: Sampler | None) -> Sampler | None:
        """Return what to hand over for a sampler, None being greedy."""
        return greedy if sampler is None and self.explicit else sampler

    def processors(self, processors: list[LogitsProcessor]) -> list[LogitsProcessor]:
        """Return what to hand over for a list of processors."""
        return processors or (_NoProcessors() if self.explicit else processors)


def probe_compatibility() -> Compatibility:
    """Look at the installed mlx-lm."""
    from mlx_lm import generate

    return Compatibility(explicit=not hasattr(generate, "_normalize_samplers"))


def prefill_step_size(config: EngineConfig) -> int:
    """Return the configured step, or the default for this machine."""
    import mlx.core as mx

    if config.prefill_step_size is not None:
        return config.prefill_step_size
    return _METAL_PREFILL_STEP if mx.metal.is_available() else _CPU_PREFILL_STEP


def make_generator(model: Any, config: EngineConfig) -> Any:
    """Return mlx-lm's `BatchGenerator` for a model, on the calling thread's own stream.

    With one stream for stepping and for what is done between steps nothing has to wait for the
    other.
    """
    import mlx.core as mx
    from mlx_lm.generate import BatchGenerator

    mx.set_cache_limit(_ALLOCATOR_CACHE_BYTES)
    return BatchGenerator(
        model,
        completion_batch_size=config.completion_batch_size,
        prefill_batch_size=config.prefill_batch_size,
        prefill_step_size=prefill_step_size(config),
        stream=mx.default_stream(mx.default_device()),
    )


def needs_snapshots(model: Any) -> bool:
    """Whether the model's caches can come to a state in which they cannot be trimmed.

    Plain key-value caches always can. Windows, chunks and recurrent states cannot, or only
    while they are short.
    """
    from mlx_lm.models import cache

    plain = (cache.KVCache, cache.QuantizedKVCache, cache.ConcatenateKVCache)

    def is_plain(layer: Any) -> bool:
        if isinstance(layer, cache.CacheList):
            return all(is_plain(part) for part in layer.caches)
        return isinstance(layer, plain)

    return not all(is_plain(layer) for layer in cache.make_prompt_cache(model))


def settle(prompt_cache: list[Any]) -> None:
    """Have the arrays of a cache computed, without waiting for it.

    A cache taken out of a batch is a lazy cut; until it is made, the whole batch is held.
    """
    import mlx.core as mx

    mx.async_eval([layer.state for layer in prompt_cache])


def close_generator(generator: Any) -> None:
    """Wait for the step that is computed ahead, then give back what the generator holds.

    A process that exits while mlx computes on a thread of its own may crash.
    """
    import mlx.core as mx

    mx.synchronize(mx.default_stream(mx.default_device()))
    generator.close()

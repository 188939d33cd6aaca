"""Builds what the stepping thread steps: the model, its batch generator and its prefix cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from smg_grpc_servicer.mlx.config import EngineConfig

_METAL_PREFILL_STEP = 2048
_CPU_PREFILL_STEP = 512

# Freed buffers that mlx may keep for itself. Without a limit it keeps as much as it ever used;
# with less than a step allocates, every step pays the system for its memory anew.
_ALLOCATOR_CACHE_BYTES = 1 << 30


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

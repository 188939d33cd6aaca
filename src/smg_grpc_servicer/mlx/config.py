"""What the MLX engine is started with, and what one request to it holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from smg_grpc_servicer.mlx.sampling import Sampling


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How to load the model and how large its batches may be.

    Args:
        model: a local directory, or the name of a model in the local Hugging Face cache.
        adapter_path: a directory with a LoRA adapter, or None.
        served_name: the name that clients see; None is `model` as it was given.
        prefill_batch_size: prompts that are read at one time.
        completion_batch_size: requests that are in the batch at one time.
        prefill_step_size: prompt tokens of one request in one step; None is 2048 on Metal and
            512 elsewhere, where a larger step would hold back those who decode for seconds.
        prefix_cache_bytes: memory for the prompts of ended requests; 0 turns reuse off.
        coalesce_s: the longest that an idle engine waits for more requests to start with the
            first; a lone one waits a quarter of it.
        stall_timeout_s: seconds without a step, work pending, after which the engine is dead;
            the reading of prompts has time of its own on top.
    """

    model: str
    adapter_path: str | None = None
    served_name: str | None = None
    prefill_batch_size: int = 8
    completion_batch_size: int = 32
    prefill_step_size: int | None = None
    prefix_cache_bytes: int = 1 << 30
    coalesce_s: float = 0.008
    stall_timeout_s: float = 120.0


@dataclass(frozen=True, slots=True)
class MlxRequest:
    """One generation, its values checked and its defaults filled in.

    Args:
        prompt_ids: at least one id, all within the model's vocabulary.
        sampling: how tokens are chosen.
        max_tokens: at least 1, and no more than the context has left.
        stop_token_ids: ids that end the output, the end-of-sequence ids among them unless the
            request ignores those.
        logprobs: None for none, 0 for the chosen token's alone, k for k alternatives.
    """

    prompt_ids: list[int]
    sampling: Sampling
    max_tokens: int
    stop_token_ids: frozenset[int]
    logprobs: int | None = None

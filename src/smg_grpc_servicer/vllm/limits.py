"""What a running vLLM engine takes, read once from its own configuration."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from smg_grpc_servicer.vllm.errors import from_vllm
from smg_wire.errors import EngineRefusal

if TYPE_CHECKING:
    from collections.abc import Mapping

# A stop string is looked for at each token, on the event loop: a bound on what that can cost.
MAX_STOP_STRINGS = 64
MAX_STOP_CHARACTERS = 1024
# A grammar is compiled in the engine's process, where nothing can interrupt it.
MAX_CONSTRAINT_CHARACTERS = 256 * 1024
# Below it vLLM computes with this instead, and says so in the log each time.
LEAST_TEMPERATURE = 0.01


@dataclass(frozen=True)
class Limits:
    """Bounds and defaults of one engine.

    `vocab_size` is the number of rows of the embedding table and of columns of the logits (an
    id of the tokenizer beyond it has neither); `most_logprobs` is what one token may ask for;
    `default_sampling` is what the model's generation config says where a caller says nothing.
    """

    vocab_size: int
    context: int
    generates: bool
    most_logprobs: int
    all_logprobs: bool
    most_choices: int
    most_temperature: float | None
    data_parallel_ranks: int
    default_sampling: Mapping[str, Any] = field(default_factory=dict)
    keeps_left: bool = False
    has_tokenizer: bool = True
    kv_connector: bool = False
    speculative: bool = False
    prompt_logprobs: bool = True
    first_token_grammar: bool = True


def read(engine_client: Any) -> Limits:
    """Return the limits of an engine that has started: its context may be fitted at start."""
    config = engine_client.vllm_config
    model, parallel = config.model_config, config.parallel_config
    # 0.31 names no local engines: then every rank is addressed from here.
    local = getattr(parallel, "local_engines_only", False)
    ranks = parallel.data_parallel_size_local if local else parallel.data_parallel_size
    vocab_size = int(model.get_vocab_size())
    most = model.max_logprobs
    tokenizer = getattr(engine_client, "tokenizer", None)
    return Limits(
        vocab_size=vocab_size,
        context=int(model.max_model_len),
        generates=model.runner_type == "generate",
        # vLLM takes any number up to its own bound, and its sampler dies of one that is larger
        # than the vocabulary.
        most_logprobs=vocab_size if most == -1 else min(int(most), vocab_size),
        all_logprobs=most == -1 or most >= vocab_size,
        most_choices=_most_choices(),
        most_temperature=_most_temperature(),
        data_parallel_ranks=int(ranks),
        default_sampling=dict(model.get_diff_sampling_param()),
        keeps_left=getattr(tokenizer, "truncation_side", "left") == "right",
        has_tokenizer=tokenizer is not None,
        kv_connector=config.kv_transfer_config is not None,
        speculative=config.speculative_config is not None,
        # Such an engine computes wrong logprobs of prompts, and refuses them.
        prompt_logprobs=not getattr(config.cache_config, "kv_sharing_fast_prefill", False),
        first_token_grammar="reasoning_ended"
        in inspect.signature(engine_client.add_request).parameters,
    )


def _most_choices() -> int:
    from vllm import envs

    return int(envs.VLLM_MAX_N_SEQUENCES)


def _most_temperature() -> float | None:
    """Return the bound of releases that have one: 2.0 since 0.32."""
    from vllm import SamplingParams

    try:
        SamplingParams(temperature=2.5)
    except Exception as error:
        if isinstance(from_vllm(error), EngineRefusal):
            return 2.0
        raise
    return None

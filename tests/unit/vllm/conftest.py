from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from tests.support import fake_vllm


def config(**changes: Any) -> Any:
    """A stand-in for vLLM's VllmConfig: a text model, without anything switched on."""
    hf = SimpleNamespace(
        model_type="llama",
        architectures=["LlamaForCausalLM"],
        eos_token_id=2,
        pad_token_id=None,
        bos_token_id=1,
    )
    values: dict[str, Any] = {
        "model_config": SimpleNamespace(
            model="/models/m",
            tokenizer="/models/m",
            tokenizer_revision=None,
            skip_tokenizer_init=False,
            served_model_name="m",
            runner_type="generate",
            max_model_len=2048,
            dtype="torch.float32",
            hf_config=hf,
            hf_text_config=hf,
            architectures=["LlamaForCausalLM"],
            multimodal_config=None,
            is_multimodal_model=False,
            get_vocab_size=lambda: 1024,
            get_diff_sampling_param=dict,
            try_get_generation_config=dict,
        ),
        "scheduler_config": SimpleNamespace(max_num_seqs=4),
        "parallel_config": SimpleNamespace(
            data_parallel_size=1,
            data_parallel_size_local=1,
            data_parallel_external_lb=False,
            data_parallel_hybrid_lb=False,
            data_parallel_backend="mp",
        ),
        "cache_config": SimpleNamespace(
            cache_dtype="auto", block_size=16, enable_prefix_caching=True, num_gpu_blocks=8
        ),
        "attention_config": SimpleNamespace(backend=None),
        "structured_outputs_config": SimpleNamespace(
            reasoning_parser="", enable_in_reasoning=False
        ),
        "kv_transfer_config": None,
        "kv_events_config": None,
        "profiler_config": SimpleNamespace(profiler=None),
    }
    return SimpleNamespace(**{**values, **changes})


class EngineClient:
    """A stand-in for AsyncLLM, of which a test says what it answers."""

    def __init__(self, vllm_config: Any) -> None:
        self.vllm_config = vllm_config
        self.model_config = vllm_config.model_config
        self.errored = False
        self.flushes: list[bool] = []
        self.profiles: list[dict[str, int]] = []
        self.profile_error: Exception | None = None
        self.shut_down = asyncio.Event()

    async def reset_prefix_cache(self) -> bool:
        return self.flushes.pop(0) if self.flushes else True

    async def start_profile(self, **bounds: int) -> None:
        self.profiles.append(bounds)
        if self.profile_error is not None:
            raise self.profile_error

    async def stop_profile(self) -> None:
        if self.profile_error is not None:
            raise self.profile_error

    async def is_paused(self) -> bool:
        return False

    def shutdown(self) -> None:
        self.shut_down.set()


@pytest.fixture
def vllm_config() -> Any:
    return config()


@pytest.fixture
def engine_client(vllm_config: Any) -> EngineClient:
    return EngineClient(vllm_config)


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment in which `import vllm` works."""
    fake_vllm.install(monkeypatch)

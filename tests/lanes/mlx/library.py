"""mlx-lm itself, apart from any worker: it makes the tests' models and says what they answer.

Each use is a process of its own: what the library leaves running on its main thread may crash
an interpreter that ends, and that must not be the one that runs the tests.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.support.processes import ROOT

if TYPE_CHECKING:
    from collections.abc import Sequence

VOCABULARY = 49152
WINDOW = 64

_LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
}
_MAMBA2 = {
    "model_type": "mamba2",
    "num_heads": 4,
    "head_dim": 32,
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "state_size": 16,
    "num_hidden_layers": 3,
    "layer_norm_epsilon": 1e-5,
    "conv_kernel": 4,
    "n_groups": 1,
    "use_bias": False,
    "use_conv_bias": True,
    "tie_word_embeddings": False,
    "time_step_limit": [0.001, 100.0],
    "time_step_rank": "auto",
    "eos_token_id": 2,
}
_FALCON_H1 = {
    "model_type": "falcon_h1",
    "hidden_size": 64,
    "intermediate_size": 128,
    "head_dim": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "mamba_chunk_size": 32,
    "mamba_d_head": 32,
    "mamba_d_ssm": 128,
    "mamba_d_state": 16,
    "mamba_n_heads": 4,
    "max_position_embeddings": 2048,
    "vocab_size": VOCABULARY,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
}
_QWEN3_5_TEXT = {
    "model_type": "qwen3_5_text",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 3072,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
}
_GEMMA3_TEXT = {
    "model_type": "gemma3_text",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "query_pre_attn_scalar": 16,
    "sliding_window": WINDOW,
    "sliding_window_pattern": 2,
    "max_position_embeddings": 1024,
    "eos_token_id": [2, 7],
}
_GPT2 = {
    "model_type": "gpt2",
    "architectures": ["GPT2LMHeadModel"],
    "n_ctx": 128,
    "n_positions": 128,
    "n_embd": 64,
    "n_head": 4,
    "n_layer": 2,
    "layer_norm_epsilon": 1e-5,
    "vocab_size": VOCABULARY,
    "eos_token_id": 2,
}

# Families small enough to be made of random numbers on the spot, by what is particular to them.
CONFIGS: dict[str, dict[str, Any]] = {
    "plain": _LLAMA,
    "recurrent": _MAMBA2,
    "hybrid": _FALCON_H1,
    "nested-hybrid": {
        "model_type": "qwen3_5",
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "text_config": _QWEN3_5_TEXT,
    },
    "nested-window": {
        "model_type": "gemma3",
        "architectures": ["Gemma3ForConditionalGeneration"],
        "text_config": _GEMMA3_TEXT,
        "vocab_size": VOCABULARY,
    },
    "learned-positions": _GPT2,
}

_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")


def like(source: Path, target: Path, *without: str) -> Path:
    """Make a directory of links to a model's files, but for some, for others to be put there."""
    target.mkdir(parents=True)
    for file in source.iterdir():
        if file.name not in without:
            (target / file.name).symlink_to(file.resolve())
    return target


def make(kind: str, source: Path, target: Path) -> Path:
    """Make a variant of the model in `source`: see `_MAKERS`, and `CONFIGS` for random ones."""
    if kind in CONFIGS:
        like(source, target, "config.json", "generation_config.json", "README.md", *_WEIGHTS)
        (target / "config.json").write_text(json.dumps(CONFIGS[kind]))
    _run("make", kind, str(source), str(target))
    return target


@dataclass(frozen=True)
class Reference:
    """Greedy ids by the library's own loop, and how far the second best was at each."""

    ids: list[int]
    gaps: list[float]

    def check(self, actual: Sequence[int]) -> None:
        """Fail unless these are the ids, or differ from where two tokens were all but tied."""
        for place, (mine, theirs) in enumerate(zip(actual, self.ids, strict=False)):
            if mine != theirs:
                # After a tie taken the other way the outputs have nothing to do with another.
                assert self.gaps[place] < 1e-3, (
                    f"token {place}: {mine} is not {theirs}, which is {self.gaps[place]} better"
                )
                return
        assert len(actual) == len(self.ids)


def references(
    model: Path, prompts: Sequence[Sequence[int]], tokens: int, adapter: Path | None = None
) -> list[Reference]:
    """Return what mlx-lm's `stream_generate` answers to each prompt, on its own."""
    asked = json.dumps([list(prompt) for prompt in prompts])
    adapters = [] if adapter is None else [str(adapter)]
    answered = _run("answer", str(model), str(tokens), *adapters, given=asked)
    return [Reference(ids, gaps) for ids, gaps in json.loads(answered)]


def _run(*arguments: str, given: str = "") -> str:
    paths = f"{ROOT / 'src'}{os.pathsep}{ROOT}"
    done = subprocess.run(
        [sys.executable, "-m", "tests.lanes.mlx.library", *arguments],
        env={**os.environ, "PYTHONPATH": paths},
        input=given,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1] if done.stdout else ""


def _adapter(source: str, target: str) -> None:
    import mlx.core as mx
    from mlx.utils import tree_flatten
    from mlx_lm import load
    from mlx_lm.tuner.utils import linear_to_lora_layers

    parameters = {"rank": 4, "scale": 20.0, "dropout": 0.0}
    model = load(source)[0]
    model.freeze()
    linear_to_lora_layers(model, 2, parameters)
    mx.random.seed(1)
    # A fresh adapter has zeros for its second factor, which change nothing.
    weights = {
        name: mx.random.normal(value.shape) * (0.01 if name.endswith("lora_b") else 0.1)
        for name, value in tree_flatten(model.trainable_parameters())
    }
    Path(target).mkdir()
    mx.save_safetensors(f"{target}/adapters.safetensors", weights)
    config = {"fine_tune_type": "lora", "num_layers": 2, "lora_parameters": parameters}
    Path(target, "adapter_config.json").write_text(json.dumps(config))


def _quantised(source: str, target: str) -> None:
    from mlx_lm import convert

    # In float32 what is left of it: two tokens are seldom all but tied then.
    convert(source, target, quantize=True, q_bits=4, q_group_size=64, dtype="float32")


def _bfloat16(source: str, target: str) -> None:
    from mlx_lm import convert

    convert(source, target, dtype="bfloat16")


def _random(target: str) -> None:
    """Fill a directory that has a config.json with weights that make a decided model."""
    import mlx.core as mx
    from mlx.utils import tree_flatten
    from mlx_lm import utils

    config = json.loads(Path(target, "config.json").read_text())
    model_class, arguments = utils._get_classes(config)
    model = model_class(arguments.from_dict(config))
    mx.random.seed(7)
    weights = {}
    for name, value in tree_flatten(model.parameters()):
        if value.ndim > 1 and "conv" not in name:
            fan_in = 1.0 if "embed" in name or "wte" in name else value.shape[-1]
            value = mx.random.normal(value.shape) * (1.5 / fan_in**0.5)  # noqa: PLW2901
        weights[name] = value
    mx.save_safetensors(f"{target}/model.safetensors", weights, metadata={"format": "mlx"})


_MAKERS = {"adapter": _adapter, "quantised": _quantised, "bfloat16": _bfloat16}


def _make(kind: str, source: str, target: str) -> None:
    if kind in CONFIGS:
        _random(target)
    else:
        _MAKERS[kind](source, target)


def _answer(path: str, tokens: str, adapter: str | None = None) -> None:
    import numpy as np
    from mlx_lm import load, stream_generate

    model, tokenizer = load(path, adapter_path=adapter)[:2]
    answers = []
    for prompt in json.load(sys.stdin):
        ids, gaps = [], []
        for response in stream_generate(model, tokenizer, prompt, max_tokens=int(tokens)):
            ids.append(response.token)
            best = np.sort(np.array(response.logprobs.astype(_float32())))[-2:]
            gaps.append(float(best[1] - best[0]))
        answers.append((ids, gaps))
    print(json.dumps(answers), flush=True)


def _float32() -> Any:
    import mlx.core as mx

    return mx.float32


if __name__ == "__main__":
    command, *rest = sys.argv[1:]
    {"make": _make, "answer": _answer}[command](*rest)
    sys.stdout.flush()
    os._exit(0)

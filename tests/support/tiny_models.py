"""`python -m tests.support.tiny_models SMOLLM2 OUT`: checkpoints that boot in no time.

Random weights from a seed, a few megabytes each, with SmolLM2's tokenizer and a few tokens for
media: `OUT/tiny-llama` takes text, `OUT/tiny-qwen3-vl` images and video too. What is there
already is left as it is.
"""

from __future__ import annotations

import json
import shutil
import sys
import zlib
from pathlib import Path
from typing import Any

_BASE, _VOCABULARY = 49152, 49216
_MEDIA_TOKENS = (
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<image>",
)
_IDS = {token: _BASE + place for place, token in enumerate(_MEDIA_TOKENS)}
_SPECIAL = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
_TEXT = {
    "vocab_size": _VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-6,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if 'image' in part['type'] %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif 'video' in part['type'] %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_PATCHES = {"patch_size": 16, "temporal_patch_size": 2, "merge_size": 2}
_PROCESSOR = {"processor_class": "Qwen3VLProcessor", **_PATCHES}
_PROCESSOR |= {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}


def _llama() -> tuple[Any, dict[str, dict[str, Any]]]:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**_TEXT)), {}


def _qwen3_vl() -> tuple[Any, dict[str, dict[str, Any]]]:
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    rope = {"rope_type": "default", "rope_theta": 5e6}
    rope |= {"mrope_section": [6, 5, 5], "mrope_interleaved": True}
    vision = {
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 2,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": 64,
        "num_position_embeddings": 256,
        "deepstack_visual_indexes": [0],
    }
    config = Qwen3VLConfig(
        text_config={**_TEXT, "rope_parameters": rope},
        vision_config=vision,
        image_token_id=_IDS["<|image_pad|>"],
        video_token_id=_IDS["<|video_pad|>"],
        vision_start_token_id=_IDS["<|vision_start|>"],
        vision_end_token_id=_IDS["<|vision_end|>"],
        tie_word_embeddings=True,
        **_SPECIAL,
    )
    image = {"image_processor_type": "Qwen2VLImageProcessorFast", **_PROCESSOR}
    image["size"] = {"shortest_edge": 4096, "longest_edge": 32 * 32 * 256}
    video = {"video_processor_type": "Qwen3VLVideoProcessor", **_PROCESSOR}
    video["size"] = {"shortest_edge": 4096, "longest_edge": 32 * 32 * 2 * 256}
    files = {"preprocessor_config.json": image, "video_preprocessor_config.json": video}
    return Qwen3VLForConditionalGeneration(config), files


_MODELS = {"tiny-llama": (_llama, 5), "tiny-qwen3-vl": (_qwen3_vl, 3)}


def _fill(model: Any, seed: int) -> None:
    """Give each weight values of its own seed, so that they do not hang on the order."""
    import torch

    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 1:
                weight.fill_(0.0 if name.endswith("bias") else 1.0)
                continue
            source = torch.Generator().manual_seed(zlib.crc32(name.encode()) + seed)
            weight.copy_(torch.randn(weight.shape, generator=source) * 0.08)


def _tokenizer(source: Path, target: Path) -> None:
    tokenizer = json.loads((source / "tokenizer.json").read_text(encoding="utf-8"))
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    for token, number in _IDS.items():
        added = {"id": number, "content": token, "special": True, **flags}
        tokenizer["added_tokens"].append(added)
    _write(target / "tokenizer.json", tokenizer)
    config = json.loads((source / "tokenizer_config.json").read_text(encoding="utf-8"))
    config |= {"chat_template": _TEMPLATE, "model_max_length": 8192}
    _write(target / "tokenizer_config.json", config)


def _write(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False), encoding="utf-8")


def build(name: str, source: Path, out: Path) -> None:
    """Write one model unless it is there."""
    import torch

    target = out / name
    if target.is_dir():
        return
    # Beside it first: a build that was broken off must not look like a model.
    unfinished = out / f"{name}.unfinished"
    shutil.rmtree(unfinished, ignore_errors=True)
    make, seed = _MODELS[name]
    model, files = make()
    _fill(model, seed)
    model.to(torch.bfloat16).eval().save_pretrained(unfinished)
    _tokenizer(source, unfinished)
    _write(unfinished / "generation_config.json", _SPECIAL)
    for file, value in files.items():
        _write(unfinished / file, value)
    unfinished.rename(target)


def main() -> None:
    """Build every model."""
    source, out = map(Path, sys.argv[1:3])
    out.mkdir(parents=True, exist_ok=True)
    for name in _MODELS:
        build(name, source, out)


if __name__ == "__main__":
    main()

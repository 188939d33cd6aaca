"""A complete Hugging Face directory from a Llama GGUF."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from smg_grpc_servicer.demo_model.tokenizer import (
    check_tokenizer,
    special_tokens_map,
    tokenizer_config,
    tokenizer_json,
)
from smg_grpc_servicer.demo_model.weights import write_safetensors

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from smg_grpc_servicer.demo_model.layout import DType


def model_config(metadata: Mapping[str, Any], dtype: DType) -> dict[str, Any]:
    """Return config.json."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        **_token_ids(metadata),
        "head_dim": metadata["llama.rope.dimension_count"],
        "hidden_act": "silu",
        "hidden_size": metadata["llama.embedding_length"],
        "initializer_range": metadata["llama.embedding_length"] ** -0.5,
        "intermediate_size": metadata["llama.feed_forward_length"],
        "max_position_embeddings": metadata["llama.context_length"],
        "mlp_bias": False,
        "num_attention_heads": metadata["llama.attention.head_count"],
        "num_hidden_layers": metadata["llama.block_count"],
        "num_key_value_heads": metadata["llama.attention.head_count_kv"],
        # GGUF holds 32-bit floats: seven digits are what was meant.
        "rms_norm_eps": float(f"{metadata['llama.attention.layer_norm_rms_epsilon']:.7g}"),
        "rope_scaling": None,
        "rope_theta": float(metadata["llama.rope.freq_base"]),
        "tie_word_embeddings": True,
        "torch_dtype": dtype,
        "use_cache": True,
        "vocab_size": len(metadata["tokenizer.ggml.tokens"]),
    }


def _token_ids(metadata: Mapping[str, Any]) -> dict[str, int]:
    return {
        "bos_token_id": metadata["tokenizer.ggml.bos_token_id"],
        "eos_token_id": metadata["tokenizer.ggml.eos_token_id"],
        "pad_token_id": metadata["tokenizer.ggml.padding_token_id"],
    }


def write_checkpoint(gguf_path: Path, directory: Path, dtype: DType) -> None:
    """Write every file of `layout.FILES` into an existing directory."""
    from gguf import GGUFReader
    from tqdm import tqdm

    reader = GGUFReader(gguf_path)
    metadata = {name: field.contents() for name, field in reader.fields.items()}
    special = special_tokens_map(metadata)
    documents: dict[str, Mapping[str, Any]] = {
        "config.json": model_config(metadata, dtype),
        "generation_config.json": _token_ids(metadata),
        "special_tokens_map.json": special,
        "tokenizer.json": tokenizer_json(metadata),
        "tokenizer_config.json": tokenizer_config(metadata),
    }
    for name, document in documents.items():
        text = json.dumps(document, indent=1, ensure_ascii=False)
        (directory / name).write_text(text, encoding="utf-8")
    check_tokenizer((directory / "tokenizer.json").read_text(encoding="utf-8"), special)
    heads = {
        "attn_q": metadata["llama.attention.head_count"],
        "attn_k": metadata["llama.attention.head_count_kv"],
    }
    write_safetensors(
        directory / "model.safetensors",
        list(reader.tensors),
        heads,
        dtype,
        # None: a bar on a terminal, nothing in a log.
        lambda tensors: tqdm(tensors, desc=f"weights to {dtype}", unit="tensor", disable=None),
    )

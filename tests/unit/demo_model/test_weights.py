from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter, quants
from safetensors import safe_open

from smg_grpc_servicer.demo_model.weights import (
    hugging_face_name,
    to_bfloat16,
    undo_rope_permutation,
    write_safetensors,
)

if TYPE_CHECKING:
    from pathlib import Path

HEADS = {"attn_q": 2, "attn_k": 1}


def permuted_by_llama_cpp(weight: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to a Hugging Face query or key projection."""
    rows, columns = weight.shape
    halves = weight.reshape(heads, 2, rows // heads // 2, columns)
    return halves.swapaxes(1, 2).reshape(rows, columns)


@pytest.fixture
def random() -> np.random.Generator:
    return np.random.default_rng(7)


def gguf_tensors(path: Path, tensors: dict[str, tuple[np.ndarray, GGMLQuantizationType]]) -> Any:
    writer = GGUFWriter(path, "llama")
    for name, (values, kind) in tensors.items():
        writer.add_tensor(name, quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return list(GGUFReader(path).tensors)


def written(path: Path) -> dict[str, np.ndarray]:
    with safe_open(path, "numpy") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("token_embd.weight", "model.embed_tokens.weight"),
        ("output_norm.weight", "model.norm.weight"),
        ("output.weight", "lm_head.weight"),
        ("blk.0.attn_norm.weight", "model.layers.0.input_layernorm.weight"),
        ("blk.12.attn_q.weight", "model.layers.12.self_attn.q_proj.weight"),
        ("blk.29.ffn_down.weight", "model.layers.29.mlp.down_proj.weight"),
    ],
)
def test_tensors_get_hugging_faces_names(name: str, expected: str) -> None:
    assert hugging_face_name(name) == expected


@pytest.mark.parametrize("heads", [1, 3])
def test_rope_permutation_is_undone(heads: int, random: np.random.Generator) -> None:
    weight = random.standard_normal((heads * 8, 5), dtype=np.float32)

    restored = undo_rope_permutation(permuted_by_llama_cpp(weight, heads), heads)

    np.testing.assert_array_equal(restored, weight)


@pytest.mark.parametrize(
    ("value", "bits"),
    [
        (0.0, 0x0000),
        (1.0, 0x3F80),
        (-2.0, 0xC000),
        # Halfway between two neighbours: to the even one, once down and once up.
        (1.0 + 2**-8, 0x3F80),
        (1.0 + 3 * 2**-8, 0x3F82),
        # Just over halfway: up.
        (1.0 + 2**-8 + 2**-20, 0x3F81),
    ],
)
def test_bfloat16_rounds_to_the_nearest_and_ties_to_even(value: float, bits: int) -> None:
    assert to_bfloat16(np.array([value], np.float32))[0] == bits


def test_queries_and_keys_alone_are_reordered(tmp_path: Path, random: np.random.Generator) -> None:
    query, key, value = (
        random.standard_normal((rows, 32), dtype=np.float32) for rows in (16, 8, 8)
    )
    plain = GGMLQuantizationType.F32
    tensors = gguf_tensors(
        tmp_path / "model.gguf",
        {
            "blk.0.attn_q.weight": (permuted_by_llama_cpp(query, 2), plain),
            "blk.0.attn_k.weight": (permuted_by_llama_cpp(key, 1), plain),
            "blk.0.attn_v.weight": (value, plain),
        },
    )

    write_safetensors(tmp_path / "model.safetensors", tensors, HEADS, "float32")

    result = written(tmp_path / "model.safetensors")
    layer = "model.layers.0.self_attn"
    np.testing.assert_array_equal(result[f"{layer}.q_proj.weight"], query)
    np.testing.assert_array_equal(result[f"{layer}.k_proj.weight"], key)
    np.testing.assert_array_equal(result[f"{layer}.v_proj.weight"], value)


def test_q8_0_and_q4_1_are_dequantised(tmp_path: Path, random: np.random.Generator) -> None:
    values = random.uniform(-1, 1, (4, 64)).astype(np.float32)
    tensors = gguf_tensors(
        tmp_path / "model.gguf",
        {
            "token_embd.weight": (values, GGMLQuantizationType.Q8_0),
            "blk.0.ffn_up.weight": (values, GGMLQuantizationType.Q4_1),
        },
    )

    write_safetensors(tmp_path / "model.safetensors", tensors, HEADS, "float32")

    result = written(tmp_path / "model.safetensors")
    # Half a step of each: 1/127 of the largest value, 1/15 of the range.
    np.testing.assert_allclose(result["model.embed_tokens.weight"], values, atol=1 / 127)
    np.testing.assert_allclose(result["model.layers.0.mlp.up_proj.weight"], values, atol=1 / 14)


def test_bfloat16_files_hold_the_rounded_weights(tmp_path: Path) -> None:
    values = np.linspace(-3, 3, 64, dtype=np.float32).reshape(2, 32)
    tensors = gguf_tensors(
        tmp_path / "model.gguf", {"token_embd.weight": (values, GGMLQuantizationType.F32)}
    )
    path = tmp_path / "model.safetensors"

    write_safetensors(path, tensors, HEADS, "bfloat16")

    with safe_open(path, "numpy") as file:
        stored = file.get_slice("model.embed_tokens.weight")
        assert (stored.get_dtype(), stored.get_shape()) == ("BF16", [2, 32])
        assert file.metadata() == {"format": "pt"}
    raw = path.read_bytes()[-values.size * 2 :]
    np.testing.assert_array_equal(
        np.frombuffer(raw, "<u2").reshape(values.shape), to_bfloat16(values)
    )

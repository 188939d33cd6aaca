"""Llama weights: from a GGUF's quantised tensors to a safetensors file."""

from __future__ import annotations

import json
import struct
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    import numpy.typing as npt

    from smg_grpc_servicer.demo_model.layout import DType

    Array = npt.NDArray[Any]

_TAGS: dict[DType, tuple[str, int]] = {"float32": ("F32", 4), "bfloat16": ("BF16", 2)}

_OUTSIDE_LAYERS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def hugging_face_name(name: str) -> str:
    """Return the name that Hugging Face's Llama gives the tensor which a GGUF calls `name`."""
    if name in _OUTSIDE_LAYERS:
        return _OUTSIDE_LAYERS[name]
    _, layer, part, kind = name.split(".")
    return f"model.layers.{int(layer)}.{_IN_LAYER[part]}.{kind}"


def undo_rope_permutation(weight: Array, heads: int) -> Array:
    """Undo llama.cpp's order of the rows of a query or key projection.

    llama.cpp rotates neighbouring rows, Hugging Face rotates row i with row i + half a head.
    """
    rows, columns = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, columns)
    restored: Array = pairs.swapaxes(1, 2).reshape(rows, columns)
    return restored


def to_bfloat16(values: Array) -> Array:
    """Round float32 to bfloat16, ties to even; numpy has no such type, so bits come back."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def _plain(tensor: Any, heads: dict[str, int]) -> Array:
    from gguf import quants

    values: Array = quants.dequantize(tensor.data, tensor.tensor_type)
    part = tensor.name.split(".")[-2]
    return undo_rope_permutation(values, heads[part]) if part in heads else values


def _header(tensors: Iterable[Any], dtype: DType) -> bytes:
    tag, width = _TAGS[dtype]
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start = 0
    for tensor in tensors:
        # ggml counts dimensions from the innermost.
        shape = [int(length) for length in reversed(tensor.shape)]
        end = start + prod(shape) * width
        header[hugging_face_name(tensor.name)] = {
            "dtype": tag,
            "shape": shape,
            "data_offsets": [start, end],
        }
        start = end
    encoded = json.dumps(header).encode()
    return encoded + b" " * (-len(encoded) % 8)


def write_safetensors(
    path: Path,
    tensors: list[Any],
    heads: dict[str, int],
    dtype: DType,
    progress: Callable[[list[Any]], Iterable[Any]] = iter,
) -> None:
    """Write a GGUF's tensors as one safetensors file, holding one tensor in memory at a time.

    The format is written here and not by the safetensors package, which takes bfloat16 only
    from arrays that numpy does not have, and by calls that differ between its releases.

    Args:
        path: The file to write.
        tensors: Tensors of a `gguf.GGUFReader`.
        heads: How many heads the parts have whose rows llama.cpp has permuted.
        dtype: What the file holds.
        progress: Wraps the list that is iterated, as tqdm does.
    """
    header = _header(tensors, dtype)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)))
        file.write(header)
        for tensor in progress(tensors):
            values = _plain(tensor, heads)
            if dtype == "bfloat16":
                file.write(to_bfloat16(values).astype("<u2").tobytes())
            else:
                file.write(values.astype("<f4").tobytes())

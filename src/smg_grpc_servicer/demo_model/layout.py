"""What a built model consists of, and how a whole one is told from a damaged one."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Literal, get_args

if TYPE_CHECKING:
    from pathlib import Path

DType = Literal["float32", "bfloat16"]
DTYPES: tuple[DType, ...] = get_args(DType)

FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
)


def is_complete(directory: Path, dtype: DType) -> bool:
    """Tell whether a directory holds the whole model in that dtype."""
    if not all((directory / name).is_file() for name in FILES):
        return False
    try:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except ValueError:
        return False
    return isinstance(config, dict) and config.get("torch_dtype") == dtype

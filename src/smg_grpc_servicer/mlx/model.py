"""Loads a model with mlx-lm and states the facts about it. No call here uses the network."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smg_wire.errors import StartError

if TYPE_CHECKING:
    from collections.abc import Iterable

logger = logging.getLogger(__name__)

_UNLIMITED_CONTEXT = 1 << 20

_ADAPTER_CONFIG = "adapter_config.json"
_ADAPTER_WEIGHTS = "adapters.safetensors"

_INSTALL = "pip install 'smg-grpc-servicer[mlx]'"

# What config.json calls the most tokens that a model was built for. A family with learned
# positions reads outside of its table beyond that, so a missed name is worse than a tight one.
_CONTEXT_NAMES = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "max_sequence_length",
    "max_seq_length",
    "max_context_length",
    "model_max_length",
    "n_ctx",
    "block_size",
)

# What the families that mlx-lm knows call their token embedding, commonest first.
_EMBEDDING_NAMES = (
    "embed_tokens",
    "wte",
    "tok_embeddings",
    "word_embeddings",
    "embed_in",
    "token_embedding",
    "embeddings",
    "embedding",
    "embed",
)


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What is true of a loaded model.

    Args:
        model_path: the directory that the model was read from.
        served_name: the name that clients see.
        model_type: of config.json, empty if it names none.
        architectures: of config.json.
        vocab_size: rows of the token embedding as loaded; an id from here on has no meaning and
            reading it would be out of bounds. From config.json if no embedding is found.
        max_context_length: tokens of prompt and output together, from config.json; a model that
            names none (recurrent ones have no limit) is given 2**20.
        eos_token_ids: every id that ends a turn by the tokenizer, by config.json or by
            generation_config.json; sorted.
        pad_token_id: from config.json, else the tokenizer's.
        bos_token_id: from config.json, else the tokenizer's.
    """

    model_path: str
    served_name: str
    model_type: str
    architectures: tuple[str, ...]
    vocab_size: int
    max_context_length: int
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None
    bos_token_id: int | None


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """The network (mlx.nn.Module), its tokenizer (mlx-lm's wrapper) and the facts about them."""

    model: Any
    tokenizer: Any
    facts: ModelFacts


def load_model(
    model: str, adapter_path: str | None = None, served_name: str | None = None
) -> LoadedModel:
    """Load a model on the calling thread, which must be the one that steps it.

    Raises:
        StartError: in one line, what is missing or why the model does not load.
    """
    load = _mlx_load()
    path = find_model(model)
    adapter = None if adapter_path is None else _find_adapter(adapter_path)
    try:
        network, tokenizer = load(str(path), adapter_path=adapter)[:2]
    except Exception as error:
        logger.debug("loading failed", exc_info=True)
        what = path if adapter is None else f"{path} with the adapter in {adapter}"
        raise StartError(f"cannot load the model in {what}: {_one_line(error)}") from error
    if adapter is not None:
        _check_applied(adapter, network)
    return LoadedModel(network, tokenizer, _facts(path, served_name or model, network, tokenizer))


def _mlx_load() -> Any:
    try:
        from mlx_lm import load
        from mlx_lm.generate import BatchGenerator
    except ImportError as error:
        raise StartError(f"mlx-lm cannot be imported ({_one_line(error)}): {_INSTALL}") from error
    # The batch generator that hands out the cache of a running request came with 0.31.3.
    if not hasattr(BatchGenerator, "extract_cache"):
        raise StartError(f"mlx-lm is too old, its batches cannot be taken apart: {_INSTALL}")
    return load


def find_model(model: str) -> Path:
    """Return the directory of a model: itself one, or a cached hub name's snapshot.

    Raises:
        StartError: there is no such directory and no such name in the local cache.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise StartError(f"model {model!r} is a directory without config.json")
        return path
    if path.exists() or model.startswith(("/", ".", "~")) or model.count("/") > 1:
        raise StartError(f"model {model!r} is not a directory")
    try:
        from mlx_lm.utils import hf_repo_to_path

        found = Path(hf_repo_to_path(model))
    except Exception as error:
        raise StartError(
            f"model {model!r} is neither a directory nor in the local Hugging Face cache"
        ) from error
    if not (found / "config.json").is_file():
        raise StartError(f"model {model!r} in the local Hugging Face cache is incomplete")
    return found


def _find_adapter(adapter_path: str) -> str:
    path = Path(adapter_path).expanduser()
    if not path.is_dir():
        raise StartError(f"adapter_path {adapter_path!r} is not a directory")
    for name in (_ADAPTER_CONFIG, _ADAPTER_WEIGHTS):
        if not (path / name).is_file():
            raise StartError(f"adapter_path {adapter_path!r} is a directory without {name}")
    return str(path)


def _check_applied(adapter: str, network: Any) -> None:
    """Refuse an adapter that the model has no place for.

    mlx-lm before 0.32 skips such weights without a word, and the base model would answer.
    """
    import mlx.core as mx
    from mlx.utils import tree_flatten

    weights = mx.load(str(Path(adapter) / _ADAPTER_WEIGHTS))
    unknown = weights.keys() - dict(tree_flatten(network.parameters())).keys()
    if unknown or not weights:
        problem = f"the model has no {min(unknown)}" if unknown else "it holds no weights"
        raise StartError(f"the adapter in {adapter} does not fit the model: {problem}")


def _facts(path: Path, served_name: str, network: Any, tokenizer: Any) -> ModelFacts:
    config = _read_json(path / "config.json")
    generation = _read_json(path / "generation_config.json")
    text = config.get("text_config")
    text = text if isinstance(text, dict) else {}
    eos = {
        *_ids(getattr(tokenizer, "eos_token_ids", None)),
        *_ids(config.get("eos_token_id")),
        *_ids(text.get("eos_token_id")),
        *_ids(generation.get("eos_token_id")),
    }
    rows = _embedding_rows(network) or _first_int(config, text, "vocab_size")
    return ModelFacts(
        model_path=str(path),
        served_name=served_name,
        model_type=str(config.get("model_type") or ""),
        architectures=tuple(str(name) for name in config.get("architectures") or ()),
        vocab_size=rows or 0,
        max_context_length=(_first_int(config, text, *_CONTEXT_NAMES) or _UNLIMITED_CONTEXT),
        eos_token_ids=tuple(sorted(eos)),
        pad_token_id=_special(config, text, tokenizer, "pad_token_id"),
        bos_token_id=_special(config, text, tokenizer, "bos_token_id"),
    )


def _embedding_rows(network: Any) -> int | None:
    """Return the rows of the token embedding, quantised or not, or None if none is found.

    Quantised weights are packed along their last axis; the first is rows all the same. An
    adapter wraps the embedding and calls the inner one `embedding`.
    """
    from mlx import nn

    tables: dict[str, int] = {}
    for path, module in network.named_modules():
        if isinstance(module, (nn.Embedding, nn.QuantizedEmbedding)):
            parts = path.split(".")
            name = parts[-1]
            if name == "embedding" and len(parts) > 1 and parts[-2] in _EMBEDDING_NAMES:
                name = parts[-2]
            tables[name] = max(int(module.weight.shape[0]), tables.get(name, 0))
    for name in _EMBEDDING_NAMES:
        if name in tables:
            return tables[name]
    return max(tables.values(), default=None)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _ids(value: Any) -> Iterable[int]:
    """Return the ids in a field that may hold none, one or several."""
    values = [value] if isinstance(value, int) else value or ()
    return [item for item in values if isinstance(item, int) and not isinstance(item, bool)]


def _first_int(config: dict[str, Any], text: dict[str, Any], *keys: str) -> int | None:
    for key in keys:
        for source in (text, config):
            value = source.get(key)
            if isinstance(value, int) and value > 0:
                return value
    return None


def _special(config: dict[str, Any], text: dict[str, Any], tokenizer: Any, key: str) -> int | None:
    for value in (config.get(key), text.get(key), getattr(tokenizer, key, None)):
        for item in _ids(value):
            return item
    return None


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__

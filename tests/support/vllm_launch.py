"""vLLM workers as processes, under vLLM's own launchers and under ours."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.support.processes import ROOT, Process

if TYPE_CHECKING:
    from collections.abc import Mapping

# What makes a start possible and bounded on a CPU that is shared: one thread a process, because
# threads that spin for each other on two cores make a token take a second.
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}
# Prefix hits begin at a block, and 32 is the smallest that vLLM's CPU backend has.
ENGINE = ("--max-model-len", "2048", "--max-num-seqs", "32", "--block-size", "32")
EAGER = ("--dtype", "float32", "--enforce-eager")

_PYTHON = sys.executable
LAUNCHERS = {
    "vllm serve --grpc": [str(Path(_PYTHON).parent / "vllm"), "serve", "{model}", "--grpc"],
    "vLLM's module": [_PYTHON, "-m", "vllm.entrypoints.launchers.grpc_server", "--model={model}"],
    "ours": [_PYTHON, "-m", "smg_grpc_servicer.vllm", "{model}"],
}
BOOT_SECONDS = 300.0


def model_directory(name: str) -> str:
    """Return a model of the lane: "smollm2", or a tiny one by its name."""
    variable = "SMG_TEST_MODEL" if name == "smollm2" else "SMG_TEST_TINY_MODELS"
    found = os.environ.get(variable)
    if not found:
        pytest.fail(f"{variable} names no directory")
    return found if name == "smollm2" else str(Path(found) / name)


def entry_points(directory: Path) -> str:
    """Return the path on which vLLM finds the plugin of this source tree.

    An installed package is found by itself; for one that is only on PYTHONPATH this writes what
    an installation would have written.
    """
    path = f"{ROOT / 'src'}{os.pathsep}{ROOT}"
    group = importlib.metadata.entry_points(group="vllm.general_plugins")
    if any(entry.value.startswith("smg_grpc_servicer.") for entry in group):
        return path
    info = directory / "smg_grpc_servicer-0.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: smg-grpc-servicer\nVersion: 0\n")
    (info / "entry_points.txt").write_text(
        "[vllm.general_plugins]\nsmg_grpc_servicer = smg_grpc_servicer.vllm.plugin:register\n"
    )
    return f"{path}{os.pathsep}{directory}"


def start(
    launcher: str,
    model: str,
    path: str,
    *options: str,
    env: Mapping[str, str] | None = None,
    port: int | None = None,
) -> Process:
    """Start a worker on loopback; `path` is what `entry_points` returned."""
    return Process(
        "--host",
        "127.0.0.1",
        *ENGINE,
        *options,
        command=[word.format(model=model) for word in LAUNCHERS[launcher]],
        env={**ENVIRONMENT, "PYTHONPATH": path, **(env or {})},
        port=port,
    )


def descendants(process: int) -> dict[int, str]:
    """Return the processes below one, by id, with the title that each has given itself."""
    import psutil

    found = {}
    for child in psutil.Process(process).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            found[child.pid] = " ".join(child.cmdline())
    return found


def gone(processes: list[int], seconds: float) -> bool:
    """Say whether all of these processes have ended within the time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not any(map(_runs, processes)):
            return True
        time.sleep(0.05)
    return False


def _runs(process: int) -> bool:
    import psutil

    try:
        return bool(psutil.Process(process).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.support.processes import Process, free_port

if TYPE_CHECKING:
    from collections.abc import Iterator

BLOCK = 32
MAX_NUM_SEQS = 4

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # Threads that spin on a shared core cost more than they bring.
    "OMP_NUM_THREADS": "1",
}


def start_worker(sockets: Path, *options: str) -> Process:
    """Start an engine whose publisher listens in a directory; few blocks, so that some go."""
    events = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"ipc://{sockets}/events",
        "replay_endpoint": f"ipc://{sockets}/replay",
    }
    return Process(
        "--model",
        str(Path(os.environ["SMG_TEST_TINY_MODELS"]) / "tiny-llama"),
        "--max-model-len",
        "512",
        "--max-num-seqs",
        str(MAX_NUM_SEQS),
        "--dtype",
        "float32",
        "--enforce-eager",
        "--block-size",
        str(BLOCK),
        "--num-gpu-blocks-override",
        "64",
        "--kv-events-config",
        json.dumps(events),
        *options,
        command=[sys.executable, "-m", "smg_grpc_servicer.vllm"],
        env=ENVIRONMENT,
        port=free_port(),
    )


@pytest.fixture(scope="session")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a worker that the whole session shares."""
    with start_worker(tmp_path_factory.mktemp("kv")) as process:
        process.until_serving(240)
        yield process.address

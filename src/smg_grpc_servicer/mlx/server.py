"""The MLX worker's program: `python -m smg_grpc_servicer.mlx --model M`.

`python -m smg_grpc_servicer.mlx.server` is the same.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from smg_grpc_servicer.serving.lifecycle import leave, run
from smg_grpc_servicer.serving.proto_check import problem
from smg_grpc_servicer.settings import MlxSettings
from smg_wire.errors import StartError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from smg_grpc_servicer.mlx.worker import MlxWorker
    from smg_grpc_servicer.serving.health import Health
    from smg_wire.observability import WorkerMetrics


def _worker(settings: MlxSettings, health: Health, metrics: WorkerMetrics) -> MlxWorker:
    skew = problem("mlx")
    if skew is not None:
        raise StartError(skew)
    try:
        from smg_grpc_servicer.mlx.worker import MlxWorker
    except ImportError as error:
        raise StartError(
            f"the MLX worker cannot be imported ({error}): pip install 'smg-grpc-servicer[mlx]'"
        ) from error

    return MlxWorker(settings, health, metrics)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the worker; return the exit code of `smg_grpc_servicer.serving.lifecycle`."""
    # The model is a directory or in the local cache: a worker never waits for a model hub.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    return run(MlxSettings, _worker, engine="mlx", argv=sys.argv[1:] if argv is None else argv)


if __name__ == "__main__":
    leave(main())

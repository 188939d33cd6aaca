"""`python -m smg_grpc_servicer.mlx`."""

from __future__ import annotations

from smg_grpc_servicer.mlx.server import main
from smg_grpc_servicer.serving.lifecycle import leave

if __name__ == "__main__":
    leave(main())

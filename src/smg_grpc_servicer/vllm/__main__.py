"""`python -m smg_grpc_servicer.vllm`."""

from __future__ import annotations

from smg_grpc_servicer.serving.lifecycle import leave
from smg_grpc_servicer.vllm.server import main

if __name__ == "__main__":
    leave(main())

"""gRPC servicers that expose LLM engines over the smg-grpc-proto services."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("smg-grpc-servicer")
except PackageNotFoundError:  # a source tree on PYTHONPATH, never installed
    __version__ = "0+unknown"

__all__ = ["__version__"]

"""`python -m smg_grpc_servicer.demo_model` prints the path of the demo model."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from smg_grpc_servicer.demo_model import DTYPES, ensure_demo_model
from smg_wire.errors import StartError

_START_ERROR_EXIT = 3


def main(arguments: list[str] | None = None) -> int:
    """Build the model if it is not there yet and print where it is, alone on stdout."""
    parser = argparse.ArgumentParser(
        prog="python -m smg_grpc_servicer.demo_model",
        description="Build the demo model, SmolLM2-135M-Instruct, once, and print its path.",
    )
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        default="float32",
        help="what the weights are stored as; float32 is the fastest on a CPU (default)",
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="DIR",
        help="where to build it (default: in the user's cache directory)",
    )
    options = parser.parse_args(arguments)
    try:
        directory = ensure_demo_model(options.dtype, options.output)
    except StartError as error:
        print(f"error: {error.message}", file=sys.stderr)
        return _START_ERROR_EXIT
    print(directory)
    return 0


if __name__ == "__main__":
    sys.exit(main())

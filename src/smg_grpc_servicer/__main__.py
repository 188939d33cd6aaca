"""`python -m smg_grpc_servicer COMMAND`."""

from __future__ import annotations

import sys

from smg_grpc_servicer import __version__
from smg_wire.errors import SettingsError

_USAGE = """\
usage: python -m smg_grpc_servicer COMMAND [ARGUMENTS]

commands:
  ask TARGET PROMPT   ask a running worker and stream its answer
  doctor              say what is installed here and what would not work

workers:
  python -m smg_grpc_servicer.mlx --model MODEL
  python -m smg_grpc_servicer.vllm MODEL

options:
  -h, --help          this text; every command and worker has its own
  --version           the version
"""


def main() -> int:
    """Run a command; return its exit code, 2 for a wrong flag."""
    argv = sys.argv[1:]
    command = argv[0] if argv else "--help"
    try:
        if command == "ask":
            from smg_grpc_servicer import ask

            return ask.main(argv[1:])
        if command == "doctor":
            from smg_grpc_servicer import doctor

            return doctor.main(argv[1:])
    except SettingsError as error:
        print(f"error: {error.message}", file=sys.stderr)
        return 2
    if command == "--version":
        print(__version__)
        return 0
    if command in ("-h", "--help"):
        print(_USAGE, end="")
        return 0
    print(f"error: {command} is no command: ask or doctor", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())

"""`python -m smg_grpc_servicer doctor`: what is installed here, and what would stand in the way.

One line a check: `ok`, `warn` (it works, but) or `FAIL` (it will not work), and how to mend it.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from smg_grpc_servicer.serving import proto_check
from smg_wire.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

OK, WARN, FAIL = "ok", "warn", "FAIL"

_PACKAGES = ("smg_grpc_servicer", "smg_grpc_proto", "smg_wire")
# Distributions on which a worker of each engine depends, and the import name of the engine.
_ENGINES = {
    "mlx": ("mlx_lm", ("mlx", "mlx-lm")),
    "vllm": ("vllm", ("vllm",)),
    "sglang": ("sglang", ("sglang",)),
    "tokenspeed": ("tokenspeed", ("tokenspeed",)),
}
_LIBRARIES = ("grpcio", "protobuf", "smg-grpc-proto", "uvloop")
_SMALL_SHM_BYTES = 64 * 1024**2


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    level: str
    text: str


def examine() -> Iterator[Finding]:
    """Yield every finding, in the order of the stack."""
    yield Finding(OK, f"Python {sys.version.split()[0]} at {sys.executable}")
    yield from _libraries()
    yield from _owners()
    yield from _proto()
    yield from _engines()
    yield from _shared_memory()
    yield from _compiler()


def _libraries() -> Iterator[Finding]:
    for name in ("smg-grpc-servicer", *_LIBRARIES):
        version = _version(name)
        if version is None:
            yield Finding(
                WARN if name == "uvloop" else FAIL, f"{name} is not installed: pip install {name}"
            )
        else:
            yield Finding(OK, f"{name} {version}")


def _owners() -> Iterator[Finding]:
    """Two distributions with one import name overwrite each other's files."""
    owners = importlib.metadata.packages_distributions()
    for package in _PACKAGES:
        names = sorted(set(owners.get(package, ())))
        if len(names) > 1:
            keep = next((name for name in names if not name.startswith("tokenspeed-")), names[0])
            others = " ".join(name for name in names if name != keep)
            yield Finding(
                FAIL,
                f"{package} is owned by {' and '.join(names)}: pip uninstall -y {others} && "
                f"pip install --force-reinstall --no-deps {keep}",
            )


def _proto() -> Iterator[Finding]:
    problems = [
        text for engine in proto_check.NEWEST_FIELDS if (text := proto_check.problem(engine))
    ]
    for text in problems:
        yield Finding(FAIL, text)
    if not problems:
        yield Finding(OK, "smg-grpc-proto knows every field that this release sets")


def _engines() -> Iterator[Finding]:
    found = False
    for engine, (module, distributions) in _ENGINES.items():
        if importlib.util.find_spec(module) is None:
            continue
        found = True
        versions = ", ".join(f"{name} {_version(name) or '?'}" for name in distributions)
        yield Finding(OK, f"engine {engine}: {versions}")
    if not found:
        yield Finding(WARN, "no engine is installed: pip install 'smg-grpc-servicer[mlx]'")


def _shared_memory() -> Iterator[Finding]:
    path = Path("/dev/shm")
    if not path.is_dir():
        yield Finding(WARN, "/dev/shm is missing: tensors travel inside messages")
        return
    if not os.access(path, os.W_OK | os.X_OK):
        yield Finding(WARN, "/dev/shm is not writable: tensors travel inside messages")
        return
    free = shutil.disk_usage(path).free
    if free < _SMALL_SHM_BYTES:
        yield Finding(
            WARN,
            f"/dev/shm has {free // 1024**2} MiB free: containers need --shm-size=1g or --ipc=host",
        )
        return
    yield Finding(OK, f"/dev/shm has {free // 1024**2} MiB free")


def _compiler() -> Iterator[Finding]:
    """MLX's CPU backend compiles its kernels with g++ while it runs."""
    if sys.platform != "linux" or importlib.util.find_spec("mlx") is None:
        return
    if shutil.which("g++") is None:
        yield Finding(FAIL, "mlx on a CPU calls g++ at run time: sudo apt-get install -y g++")
    else:
        yield Finding(OK, f"g++ at {shutil.which('g++')}")


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def main(argv: Sequence[str]) -> int:
    """Print the report; return 1 if anything will not work."""
    if argv and argv[0] in ("-h", "--help"):
        print("usage: python -m smg_grpc_servicer doctor\n\nSays what is installed and what fails.")
        return 0
    if argv:
        raise SettingsError(f"doctor takes no arguments, got {' '.join(argv)}")
    findings = list(examine())
    for finding in findings:
        print(f"{finding.level:4}  {finding.text}")
    return 1 if any(finding.level == FAIL for finding in findings) else 0

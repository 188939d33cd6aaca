"""Finds OpenBLAS for MLX on Linux, whose own wheel carries the slow reference BLAS."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

PACKAGE = "libopenblas0-pthread"
COST = "a float32 prompt is read 10 to 15 times slower without it"

# What `ldconfig -p` calls the libraries that this machine's programs can load.
_LDCONFIG_TAGS = {"x86_64": "x86-64", "aarch64": "AArch64"}
# Debian's name of the threaded build first, then Fedora's.
_NAMES = ("libopenblas.so.0", "libopenblasp.so.0")


def _from_debian_directory(machine: str) -> str | None:
    # Debian's ldconfig name may lead to a serial build; this directory is the threaded one.
    path = Path(f"/usr/lib/{machine}-linux-gnu/openblas-pthread/libopenblas.so.0")
    return str(path) if path.exists() else None


def _from_ldconfig(machine: str) -> str | None:
    try:
        listing = subprocess.run(
            # /sbin is not on every user's PATH.
            ["ldconfig", "-p"],
            env={**os.environ, "PATH": f"{os.environ.get('PATH', '')}:/sbin:/usr/sbin"},
            capture_output=True,
            text=True,
            check=False,
        ).stdout
    except OSError:
        return None
    tag = _LDCONFIG_TAGS.get(machine, "")
    for line in listing.splitlines():
        name, _, path = line.strip().partition(" => ")
        if name.startswith(_NAMES) and tag in name:
            return path
    return None


def find_openblas() -> str | None:
    """Return the path of a threaded OpenBLAS, or None; macOS has its own BLAS and needs none."""
    if sys.platform != "linux":
        return None
    machine = platform.machine()
    return _from_debian_directory(machine) or _from_ldconfig(machine)


def preload_environment() -> dict[str, str]:
    """Return the variables that have a Python process which loads MLX use OpenBLAS.

    They are for that process alone. LD_LIBRARY_PATH is left as it is: the system's directory
    in it makes a Python built elsewhere load the system's libpython.
    """
    library = find_openblas()
    if library is None:
        return {}
    return {"LD_PRELOAD": ":".join(filter(None, (library, os.environ.get("LD_PRELOAD"))))}

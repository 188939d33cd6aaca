"""Says what this machine lacks, and which command installs it, before anything else is tried.

Runs on the standard library alone. With --install and as root on a machine with apt-get, it
installs what is missing itself. Exits with 1 when something required is still missing.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from typing import NamedTuple

import openblas

OLDEST_PYTHON = (3, 10)


class Missing(NamedTuple):
    """One thing that this machine lacks."""

    name: str
    why: str
    required: bool
    package: str | None = None
    remedy: str | None = None


def _runs(*command: str) -> bool:
    try:
        result = subprocess.run(command, capture_output=True, check=False)
    except OSError:
        return False
    return result.returncode == 0


def _python() -> Missing | None:
    if sys.version_info >= OLDEST_PYTHON:
        return None
    return Missing(
        "Python 3.10 or newer",
        f"{sys.executable} is {sys.version.split()[0]}",
        required=True,
        remedy="install one, then: make PYTHON=/path/to/python3.12 ...",
    )


def _venv() -> Missing | None:
    if _runs(sys.executable, "-c", "import ensurepip, venv"):
        return None
    package = f"python3.{sys.version_info[1]}-venv"
    return Missing("venv", "everything is installed into one", required=True, package=package)


def _compiler() -> Missing | None:
    if sys.platform != "linux" or _runs("g++", "--version"):
        return None
    return Missing("g++", "MLX compiles its CPU kernels with it", required=True, package="g++")


def _openblas() -> Missing | None:
    if sys.platform != "linux" or openblas.find_openblas():
        return None
    return Missing("OpenBLAS", openblas.COST, required=False, package=openblas.PACKAGE)


def _shared_memory() -> Missing | None:
    if sys.platform != "linux":
        return None
    try:
        with tempfile.TemporaryFile(dir="/dev/shm"):
            return None
    except OSError as error:
        return Missing(
            "writable /dev/shm",
            f"large inputs pass through it ({error.strerror})",
            required=True,
            remedy="mount -t tmpfs -o mode=1777 tmpfs /dev/shm",
        )


def _redis() -> Missing | None:
    if _runs("redis-server", "--version"):
        return None
    return Missing(
        "redis-server", "the tests of this lane start one", required=True, package="redis-server"
    )


def find_missing(redis: bool = False) -> list[Missing]:
    """Return what is missing, in the order in which it would be missed."""
    checks = [_python, _venv, _compiler, _openblas, _shared_memory]
    if redis:
        checks.append(_redis)
    return [missing for missing in (check() for check in checks) if missing is not None]


def _is_root() -> bool:
    return os.geteuid() == 0


def _install(packages: list[str]) -> None:
    print(f"installing {' '.join(packages)} with apt-get", flush=True)
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    install = ["apt-get", "-qq", "install", "-y", "--no-install-recommends"]
    subprocess.run(["apt-get", "-qq", "update"], env=environment, check=False)
    # One by one: a name that this release does not have must not keep the others out.
    for package in packages:
        subprocess.run([*install, package], env=environment, stdout=subprocess.DEVNULL, check=False)


def _remedy(missing: Missing) -> str:
    if missing.remedy is not None:
        return missing.remedy
    if not shutil.which("apt-get"):
        return f"install it with this system's package manager (Debian: {missing.package})"
    sudo = "" if _is_root() else "sudo "
    return f"{sudo}apt-get install -y {missing.package}"


def _report(found: list[Missing]) -> None:
    for missing in found:
        kind = "missing" if missing.required else "missing, and can be done without"
        print(f"{kind}: {missing.name} - {missing.why}: {_remedy(missing)}", file=sys.stderr)


def main() -> int:
    """Check, install if told to and able to, and report what is left."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--install", action="store_true", help="install with apt-get, as root")
    parser.add_argument("--redis", action="store_true", help="redis-server is needed too")
    options = parser.parse_args()
    found = find_missing(options.redis)
    packages = [missing.package for missing in found if missing.package]
    if options.install and packages and shutil.which("apt-get"):
        if _is_root():
            _install(packages)
            found = find_missing(options.redis)
        else:
            print("not root, so nothing is installed: run the commands below", file=sys.stderr)
    _report(found)
    return int(any(missing.required for missing in found))


if __name__ == "__main__":
    sys.exit(main())

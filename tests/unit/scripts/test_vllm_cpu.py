from __future__ import annotations

import email
import subprocess
import sys
from pathlib import Path

import pytest

import vllm_cpu


def test_torch_and_what_goes_with_it_are_not_taken_from_vllms_list() -> None:
    listed = [
        "torch==2.13.0+cpu",
        "torchvision",
        "torchaudio; platform_machine != 's390x'",
        "torchcodec==0.9",
        "triton-cpu==3.5",
        "triton>=3",
        "setuptools<81,>=77",
        "numpy>=1.26",
        "xgrammar (>=0.1)",
        "ray[cgraph]>=2.48; extra == 'ray'",
    ]
    assert vllm_cpu.wanted(listed) == ["triton-cpu==3.5", "numpy>=1.26", "xgrammar (>=0.1)"]


def test_torchvisions_operators_are_declared_once_and_before_their_shapes() -> None:
    source = f"import torchvision.extension\n\n\n{vllm_cpu._ANCHOR}\ndef nms():\n    pass\n"
    declared = vllm_cpu.with_operators(source)
    assert declared.index("torch.library.define") < declared.index(vllm_cpu._ANCHOR)
    assert vllm_cpu.with_operators(declared) == declared
    compile(declared, "torchvision", "exec")


def test_a_torchvision_that_has_changed_stops_the_installation() -> None:
    with pytest.raises(SystemExit, match="torchvision"):
        vllm_cpu.with_operators("another release")


def test_the_stand_in_has_the_version_that_vllm_serve_asks_for() -> None:
    found = email.message_from_string(vllm_cpu.metadata("0.32.0+cpu"))
    assert (found["Name"], found["Version"]) == ("vllm", "0.32.0+cpu")


def test_the_script_needs_nothing_but_python() -> None:
    scripts = str(Path(vllm_cpu.__file__).parent)
    code = f"import sys; sys.path.insert(0, {scripts!r}); import vllm_cpu"
    subprocess.run([sys.executable, "-S", "-c", code], check=True)

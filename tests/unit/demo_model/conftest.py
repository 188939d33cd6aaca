from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from smg_grpc_servicer.demo_model import source


@pytest.fixture(scope="session")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Tests are imported one by one and form no package, so a helper is loaded by its path.
    helper = Path(__file__).with_name("tiny_gguf.py")
    specification = importlib.util.spec_from_file_location("tiny_gguf", helper)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    module.write_tiny_gguf(path)
    return path


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "smg-grpc-servicer"


@pytest.fixture
def installed(tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(source, "installed_gguf", lambda: tiny_gguf)
    return tiny_gguf


@pytest.fixture
def not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "installed_gguf", lambda: None)

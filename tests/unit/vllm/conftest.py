from __future__ import annotations

import pytest
from tests.support import fake_vllm


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment in which `import vllm` works."""
    fake_vllm.install(monkeypatch)

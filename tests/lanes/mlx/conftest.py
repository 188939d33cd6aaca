from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.conformance.fixtures import (  # noqa: F401 - fixtures of the suite
    client,
    connect,
    facts,
    lane,
    worker,
)
from tests.lanes.mlx import library
from tests.lanes.mlx.driver import MlxDriver


class Models:
    """Variants of the demo model and random models, each made once a session when asked for."""

    def __init__(self, source: Path, root: Path) -> None:
        self.demo = source
        self._root = root

    def __call__(self, kind: str, *, of: str | None = None) -> Path:
        """Return the directory of one of `library`'s kinds, of the demo model or of another."""
        target = self._root / (kind if of is None else f"{kind}-of-{of}")
        if not target.exists():
            library.make(kind, self.demo if of is None else self(of), target)
        return target


@pytest.fixture(scope="session")
def demo_model() -> str:
    """The directory of a small model, named by the environment."""
    path = os.environ.get("SMG_TEST_MODEL")
    if not path:
        pytest.fail("SMG_TEST_MODEL names no model directory")
    return path


@pytest.fixture(scope="session")
def driver(demo_model: str) -> MlxDriver:
    return MlxDriver(demo_model)


@pytest.fixture(scope="session")
def models(demo_model: str, tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(Path(demo_model), tmp_path_factory.mktemp("models"))

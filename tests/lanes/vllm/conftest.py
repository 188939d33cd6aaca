from __future__ import annotations

import os

import pytest
from tests.conformance.fixtures import (  # noqa: F401 - fixtures of the suite
    client,
    connect,
    facts,
    lane,
    worker,
)
from tests.lanes.vllm.driver import VllmDriver


@pytest.fixture(scope="session")
def demo_model() -> str:
    """The directory of a small model, named by the environment."""
    path = os.environ.get("SMG_TEST_MODEL")
    if not path:
        pytest.fail("SMG_TEST_MODEL names no model directory")
    return path


@pytest.fixture(scope="session")
def driver(demo_model: str) -> VllmDriver:
    return VllmDriver(demo_model)

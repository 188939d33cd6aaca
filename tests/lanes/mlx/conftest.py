from __future__ import annotations

import os

import pytest


@pytest.fixture(scope="session")
def demo_model() -> str:
    """The directory of a small model, named by the environment."""
    path = os.environ.get("SMG_TEST_MODEL")
    if not path:
        pytest.fail("SMG_TEST_MODEL names no model directory")
    return path

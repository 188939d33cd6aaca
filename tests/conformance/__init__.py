"""The conformance suite: one set of tests for any worker of any engine, see `driver`."""

from __future__ import annotations

import pytest

# Before its modules are imported: their asserts then show what they compared.
pytest.register_assert_rewrite("tests.conformance.reading", "tests.conformance.suite")

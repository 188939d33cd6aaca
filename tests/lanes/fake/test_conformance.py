from __future__ import annotations

from tests.conformance.suite import *  # noqa: F403

from __future__ import annotations

import pytest
from tests.conformance.suite import *  # noqa: F403

pytestmark = pytest.mark.engine

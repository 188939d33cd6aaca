"""The conformance suite: `from tests.conformance.suite import *` runs it on a lane's `driver`."""

from __future__ import annotations

from tests.conformance.suite.bundle import TestTokenizerBundle
from tests.conformance.suite.ends import TestEnds
from tests.conformance.suite.ids import TestIds
from tests.conformance.suite.life import TestLife
from tests.conformance.suite.operations import TestOperations
from tests.conformance.suite.properties import TestProperties
from tests.conformance.suite.refusals import TestRefusals
from tests.conformance.suite.sampling import TestLogprobs, TestSeeds, TestStops
from tests.conformance.suite.streams import TestStreams

__all__ = [
    "TestEnds",
    "TestIds",
    "TestLife",
    "TestLogprobs",
    "TestOperations",
    "TestProperties",
    "TestRefusals",
    "TestSeeds",
    "TestStops",
    "TestStreams",
    "TestTokenizerBundle",
]

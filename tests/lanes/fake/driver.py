"""The serving core over an engine without a model: the suite's own test, in seconds."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from tests.conformance.driver import Capabilities, Driver, Facts
from tests.lanes.mlx.wire import SERVICE, MlxClient, refusals
from tests.support import fake_engine
from tests.support.fake_worker import MODEL

if TYPE_CHECKING:
    from pathlib import Path

    import grpc
    from tests.conformance.driver import Client, Metadata, Refusal


class FakeDriver(Driver):
    name = "fake"
    service = SERVICE
    served_model_name = MODEL
    capabilities = Capabilities()

    def __init__(self, tokenizer: Path) -> None:
        self._tokenizer = tokenizer

    def command(self) -> list[str]:
        return [
            *(sys.executable, "-m", "tests.support.fake_worker"),
            *("--tokenizer", str(self._tokenizer), "--step-seconds", "0.005"),
            *("--warm-seconds", "0.5"),
        ]

    def breakable_command(self) -> list[str]:
        return self.command()

    def slots(self, count: int) -> list[str]:
        return ["--slots", str(count)]

    @property
    def facts(self) -> Facts:
        return Facts(
            vocabulary=fake_engine.VOCABULARY,
            context=fake_engine.CONTEXT,
            end_of_sequence=fake_engine.END_OF_SEQUENCE,
            prompts=[[10, 11, 12], [20], list(range(100, 140)), [5] * 12],
        )

    def client(self, channel: grpc.aio.Channel, metadata: Metadata = ()) -> Client:
        return MlxClient(channel, metadata)

    def refusals(self) -> list[Refusal]:
        return refusals(self.facts, most_logprobs=self.capabilities.most_logprobs)

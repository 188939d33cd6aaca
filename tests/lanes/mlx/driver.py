"""The MLX worker for the conformance suite."""

from __future__ import annotations

import json
import sys
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from tests.conformance.driver import Capabilities, Driver, Facts
from tests.lanes.mlx.wire import SERVICE, MlxClient, refusals

if TYPE_CHECKING:
    import grpc
    from tests.conformance.driver import Client, Metadata, Refusal

PROMPTS = (
    "Once upon a time there was a small village by the sea, and in that village",
    "The capital of France is",
    "List the planets of the solar system, beginning with the one that is closest to the sun:",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
)


class MlxDriver(Driver):
    name = "mlx"
    service = SERVICE
    served_model_name = "conformance"
    capabilities = Capabilities(text_input=True, repeatable_logprobs=5e-2)

    def __init__(self, model: str) -> None:
        self._model = Path(model)

    def command(self) -> list[str]:
        return [sys.executable, "-m", "smg_grpc_servicer.mlx", *self._options()]

    def breakable_command(self) -> list[str]:
        return [sys.executable, "-m", "tests.lanes.mlx.breakable_worker", *self._options()]

    def _options(self) -> list[str]:
        return ["--model", str(self._model), "--served-model-name", self.served_model_name]

    def slots(self, count: int) -> list[str]:
        return ["--completion-batch-size", str(count)]

    @cached_property
    def facts(self) -> Facts:
        from tokenizers import Tokenizer

        config = json.loads((self._model / "config.json").read_text())
        tokenizer = Tokenizer.from_file(str(self._model / "tokenizer.json"))
        return Facts(
            vocabulary=config["vocab_size"],
            context=config["max_position_embeddings"],
            end_of_sequence=config["eos_token_id"],
            prompts=[tokenizer.encode(prompt).ids for prompt in PROMPTS],
        )

    def client(self, channel: grpc.aio.Channel, metadata: Metadata = ()) -> Client:
        return MlxClient(channel, metadata)

    def refusals(self) -> list[Refusal]:
        return refusals(self.facts, most_logprobs=self.capabilities.most_logprobs)

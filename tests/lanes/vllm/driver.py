"""The vLLM worker for the conformance suite: the real engine, on a CPU."""

from __future__ import annotations

import json
import os
import signal
import sys
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from tests.conformance.driver import Capabilities, Driver, Facts
from tests.lanes.vllm.refused import refusals
from tests.lanes.vllm.wire import SERVICE, VllmClient
from tests.support.vllm_launch import BOOT_SECONDS, EAGER, ENGINE, ENVIRONMENT

if TYPE_CHECKING:
    import grpc
    from tests.conformance.driver import Client, Metadata, Refusal
    from tests.support.processes import Process

PROMPTS = (
    "Once upon a time there was a small village by the sea, and in that village",
    "The capital of France is",
    "List the planets of the solar system, beginning with the one that is closest to the sun:",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
)
CONTEXT = 2048
SLOTS = 32


class VllmDriver(Driver):
    name = "vllm"
    service = SERVICE
    served_model_name = "conformance"
    capabilities = Capabilities(n=True, string_stops=True, text_input=True)
    boot_seconds = BOOT_SECONDS
    settle_seconds = 15.0

    def __init__(self, model: str, *options: str) -> None:
        self.model = Path(model)
        self._options = options

    def command(self) -> list[str]:
        return [
            *(sys.executable, "-m", "smg_grpc_servicer.vllm", str(self.model)),
            *("--served-model-name", self.served_model_name, *ENGINE, *EAGER, *self._options),
        ]

    def breakable_command(self) -> list[str]:
        return self.command()

    def break_engine(self, worker: Process) -> None:
        os.kill(engine_core(worker), signal.SIGKILL)

    def environment(self) -> dict[str, str]:
        return ENVIRONMENT

    def slots(self, count: int) -> list[str]:
        return ["--max-num-seqs", str(count)]

    @cached_property
    def facts(self) -> Facts:
        from tokenizers import Tokenizer

        config = json.loads((self.model / "config.json").read_text())
        tokenizer = Tokenizer.from_file(str(self.model / "tokenizer.json"))
        return Facts(
            vocabulary=config["vocab_size"],
            context=CONTEXT,
            end_of_sequence=config["eos_token_id"],
            prompts=[tokenizer.encode(prompt).ids for prompt in PROMPTS],
            decode=lambda ids: tokenizer.decode(list(ids), skip_special_tokens=False),
        )

    def client(self, channel: grpc.aio.Channel, metadata: Metadata = ()) -> Client:
        return VllmClient(channel, metadata)

    def refusals(self) -> list[Refusal]:
        return refusals(self.facts, most_logprobs=self.capabilities.most_logprobs)


def engine_core(worker: Process) -> int:
    """Return the process id of a worker's engine core, by the title that it gives itself."""
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((path / "stat").read_text().rsplit(")", 1)[1].split()[1])
            title = (path / "cmdline").read_text()
        except OSError:
            continue
        if parent == worker.process.pid and "EngineCore" in title:
            return int(path.name)
    raise AssertionError("the worker has no engine core")

"""The general plugin in processes that are not the gRPC launcher: it leaves vLLM as it is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from tests.support.vllm_launch import BOOT_SECONDS, ENVIRONMENT, entry_points, model_directory

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.engine

LOAD = """
import json, sys
sys.argv = {argv!r}
from vllm.plugins import load_general_plugins
load_general_plugins()
from vllm.plugins import DEFAULT_PLUGINS_GROUP, load_plugins_by_group
assert "smg_grpc_servicer" in load_plugins_by_group(DEFAULT_PLUGINS_GROUP), "not found at all"
from vllm.v1.engine.async_llm import AsyncLLM
"""
PATCHED = """
print(json.dumps(AsyncLLM.from_vllm_config.__func__.__module__))
"""
HTTP_SERVER = """
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
made = {}
AsyncLLM.__init__ = lambda self, **named: made.update(named)
AsyncLLM.__del__ = lambda self: None
flags = make_arg_parser(FlexibleArgumentParser()).parse_args(sys.argv[2:])
flags.model = flags.model_tag
config = AsyncEngineArgs.from_cli_args(flags).create_engine_config()
AsyncLLM.from_vllm_config(vllm_config=config, disable_log_stats=True)
print(json.dumps([made["vllm_config"].kv_events_config, made["log_stats"], made["stat_loggers"]]))
"""
OFFLINE = """
from vllm import LLM
if __name__ == "__main__":
    engine = LLM(sys.argv[1], max_model_len=256, enforce_eager=True, dtype="float32")
    print(json.dumps(engine.llm_engine.vllm_config.kv_events_config))
"""


def run(code: str, argv: list[str], directory: Path) -> Any:
    """Return what the last line of a program's output says, as JSON."""
    program = directory / "program.py"
    program.write_text(LOAD.format(argv=argv) + code)
    completed = subprocess.run(
        [sys.executable, str(program)],
        env={**os.environ, **ENVIRONMENT, "PYTHONPATH": entry_points(directory)},
        capture_output=True,
        text=True,
        timeout=BOOT_SECONDS,
    )
    assert completed.returncode == 0, completed.stderr
    return json.loads(completed.stdout.splitlines()[-1])


def test_vllm_is_not_touched_in_a_program_of_somebody_else(tmp_path: Path) -> None:
    assert run(PATCHED, ["somebody.py"], tmp_path) == "vllm.v1.engine.async_llm"


def test_an_http_server_gets_the_engine_that_it_asked_for(tmp_path: Path) -> None:
    argv = ["vllm", "serve", model_directory("tiny-llama"), "--max-model-len", "256"]
    assert run(HTTP_SERVER, argv, tmp_path) == [None, False, None]


@pytest.mark.slow
def test_an_offline_engine_publishes_nothing(tmp_path: Path) -> None:
    assert (
        run(OFFLINE, [model_directory("tiny-llama"), model_directory("tiny-llama")], tmp_path)
        is None
    )

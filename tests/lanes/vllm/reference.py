"""What vLLM's own `LLM` answers, computed in a process of its own.

Run as `python -m tests.lanes.vllm.reference MODEL generate|embed FILE`, where the file holds
prompts as JSON, and then what was answered: the engine's processes write to the output as well.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.lanes.vllm.driver import CONTEXT, SLOTS
from tests.support.vllm_launch import ENVIRONMENT

TOKENS = 32


def reference(model: str, task: str, prompts: list[list[int]], file: Path) -> Any:
    """Return what `LLM.generate` or `LLM.embed` says to each prompt."""
    root = Path(__file__).parents[3]
    file.write_text(json.dumps(prompts))
    done = subprocess.run(
        [sys.executable, "-m", "tests.lanes.vllm.reference", model, task, str(file)],
        env={**os.environ, **ENVIRONMENT, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(file.read_text())


def _main(model: str, task: str, file: str) -> None:
    from vllm import LLM, SamplingParams

    pooling = {"runner": "pooling", "convert": "embed"} if task == "embed" else {}
    llm = LLM(
        model,
        dtype="float32",
        max_model_len=CONTEXT,
        max_num_seqs=SLOTS,
        block_size=32,
        enforce_eager=True,
        enable_prefix_caching=False,
        **pooling,
    )
    prompts = [{"prompt_token_ids": ids} for ids in json.loads(Path(file).read_text())]
    if task == "embed":
        found = [list(one.outputs.embedding) for one in llm.embed(prompts, use_tqdm=False)]
    else:
        params = SamplingParams(
            temperature=0.0, max_tokens=TOKENS, ignore_eos=True, logprobs=2, prompt_logprobs=1
        )
        found = [_answer(one) for one in llm.generate(prompts, params, use_tqdm=False)]
    Path(file).write_text(json.dumps(found))


def _answer(output: Any) -> dict[str, Any]:
    """Tokens, their logprobs, how far behind the second best was, and the prompt's logprobs."""
    answer = output.outputs[0]
    rows = [sorted((e.logprob for e in row.values()), reverse=True) for row in answer.logprobs]
    prompt = zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
    return {
        "token_ids": list(answer.token_ids),
        "logprobs": [
            row[token].logprob for token, row in zip(answer.token_ids, answer.logprobs, strict=True)
        ],
        "margins": [row[0] - row[1] for row in rows],
        "prompt_logprobs": [row[token].logprob for token, row in prompt],
    }


if __name__ == "__main__":
    _main(*sys.argv[1:])

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from smg_grpc_servicer.vllm import limits

pytestmark = pytest.mark.usefixtures("vllm")


class Client:
    """An engine client that has nothing but a configuration."""

    def __init__(self, **changed: Any) -> None:
        fields = {
            "runner_type": "generate",
            "max_model_len": 4096,
            "max_logprobs": 20,
            "local_engines_only": False,
            "tokenizer": SimpleNamespace(truncation_side="left"),
            "kv_transfer_config": None,
            "speculative_config": None,
            "kv_sharing_fast_prefill": False,
            **changed,
        }
        self.tokenizer = fields["tokenizer"]
        self.vllm_config = SimpleNamespace(
            model_config=SimpleNamespace(
                runner_type=fields["runner_type"],
                max_model_len=fields["max_model_len"],
                max_logprobs=fields["max_logprobs"],
                get_vocab_size=lambda: 1000,
                get_diff_sampling_param=lambda: {"temperature": 0.6},
            ),
            parallel_config=SimpleNamespace(
                data_parallel_size=8,
                data_parallel_size_local=2,
                local_engines_only=fields["local_engines_only"],
            ),
            cache_config=SimpleNamespace(kv_sharing_fast_prefill=fields["kv_sharing_fast_prefill"]),
            kv_transfer_config=fields["kv_transfer_config"],
            speculative_config=fields["speculative_config"],
        )

    async def add_request(self, request_id: str, reasoning_ended: bool | None = None) -> None:
        """Only its signature is looked at."""


def test_an_ordinary_engine() -> None:
    assert limits.read(Client()) == limits.Limits(
        vocab_size=1000,
        context=4096,
        generates=True,
        most_logprobs=20,
        all_logprobs=False,
        most_choices=16384,
        most_temperature=2.0,
        data_parallel_ranks=8,
        default_sampling={"temperature": 0.6},
    )


@pytest.mark.parametrize(
    ("configured", "most", "every"),
    [(-1, 1000, True), (5, 5, False), (1000, 1000, True), (2000, 1000, True)],
)
def test_all_logprobs_are_those_of_the_vocabulary(configured: int, most: int, every: bool) -> None:
    found = limits.read(Client(max_logprobs=configured))
    assert (found.most_logprobs, found.all_logprobs) == (most, every)


def test_a_rank_is_one_of_those_that_this_process_feeds() -> None:
    assert limits.read(Client(local_engines_only=True)).data_parallel_ranks == 2


def test_what_an_engine_was_started_with_is_seen() -> None:
    found = limits.read(
        Client(
            runner_type="pooling",
            tokenizer=None,
            kv_transfer_config=object(),
            speculative_config=object(),
            kv_sharing_fast_prefill=True,
        )
    )
    assert not found.generates
    assert not found.has_tokenizer
    assert found.kv_connector
    assert found.speculative
    assert not found.prompt_logprobs
    right = SimpleNamespace(truncation_side="right")
    assert limits.read(Client(tokenizer=right)).keeps_left


def test_a_release_without_the_switch_cannot_start_a_grammar_early() -> None:
    class Older(Client):
        async def add_request(self, request_id: str) -> None:  # type: ignore[override]
            """As it was."""

    assert not limits.read(Older()).first_token_grammar

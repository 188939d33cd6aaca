"""The published router as a client of this worker."""

from __future__ import annotations

import math
import os
import time
from typing import TYPE_CHECKING, Any

import pytest
from tests.support.processes import scrape
from tests.support.router import Router

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.conformance.fixtures import Lane

pytestmark = [pytest.mark.router, pytest.mark.slow]

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
ANSWER = "The capital of France is Paris."
COMMA = 28


@pytest.fixture(scope="module")
def router(lane: Lane) -> Iterator[Router]:
    program = os.environ.get("SMG_TEST_ROUTER")
    if not program:
        pytest.fail("SMG_TEST_ROUTER names no router")
    with Router(program, lane.worker.address) as running:
        yield running


@pytest.fixture
def body(lane: Lane) -> dict[str, Any]:
    return {"model": lane.driver.served_model_name, "temperature": 0, "max_tokens": 24}


def test_the_router_lists_the_model_by_its_served_name(router: Router, lane: Lane) -> None:
    (model,) = router.get("/v1/models")["data"]
    assert model["id"] == lane.driver.served_model_name


def test_a_chat_is_answered(router: Router, body: dict[str, Any]) -> None:
    status, answer = router.post("/v1/chat/completions", {**body, "messages": QUESTION})
    assert status == 200, answer
    (choice,) = answer["choices"]
    assert choice["message"]["content"] == ANSWER
    assert choice["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == 8
    assert answer["usage"]["prompt_tokens"] == 37


def test_a_streamed_chat_is_the_same_text_and_ends_once(
    router: Router, body: dict[str, Any]
) -> None:
    request = {**body, "messages": QUESTION, "stream_options": {"include_usage": True}}
    events = list(router.events("/v1/chat/completions", request))
    deltas = [choice["delta"] for event in events for choice in event["choices"]]
    assert "".join(delta.get("content") or "" for delta in deltas) == ANSWER
    reasons = [choice["finish_reason"] for event in events for choice in event["choices"]]
    assert [reason for reason in reasons if reason] == ["stop"]
    assert events[-1]["usage"]["completion_tokens"] == 8


def test_logprobs_come_with_their_alternatives(router: Router, body: dict[str, Any]) -> None:
    request = {**body, "messages": QUESTION, "logprobs": True, "top_logprobs": 3}
    status, answer = router.post("/v1/chat/completions", request)
    assert status == 200, answer
    content = answer["choices"][0]["logprobs"]["content"]
    assert "".join(entry["token"] for entry in content).startswith("The capital of France")
    for entry in content:
        best = [top["logprob"] for top in entry["top_logprobs"]]
        assert len(best) == 3
        assert best == sorted(best, reverse=True)
        assert math.isclose(entry["logprob"], best[0], abs_tol=1e-6)


def test_a_seed_repeats_its_completion(router: Router, body: dict[str, Any]) -> None:
    def completion(seed: int) -> str:
        request = {**body, "prompt": "Once upon a time", "temperature": 1.0, "seed": seed}
        status, answer = router.post("/v1/completions", request)
        assert status == 200, answer
        text: str = answer["choices"][0]["text"]
        return text

    assert completion(7) == completion(7)
    assert completion(0) == completion(0)
    assert len({completion(seed) for seed in range(4)}) > 1


def test_a_completion_streams_what_it_answers_whole(router: Router, body: dict[str, Any]) -> None:
    request = {**body, "prompt": "Once upon a time"}
    status, whole = router.post("/v1/completions", request)
    assert status == 200, whole
    events = list(router.events("/v1/completions", request))
    text = "".join(choice["text"] for event in events for choice in event["choices"])
    assert text == whole["choices"][0]["text"]
    assert whole["choices"][0]["finish_reason"] == "length"


def test_a_stop_token_ends_a_completion(router: Router, body: dict[str, Any]) -> None:
    request = {**body, "prompt": "Once upon a time", "stop_token_ids": [COMMA]}
    status, answer = router.post("/v1/completions", request)
    assert status == 200, answer
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "stop"
    assert choice["matched_stop"] == COMMA
    assert answer["usage"]["completion_tokens"] < 24


def test_a_bad_value_is_the_callers_fault(router: Router, body: dict[str, Any]) -> None:
    request = {**body, "prompt": "Once upon a time", "logit_bias": {"999999": 1}}
    status, answer = router.post("/v1/completions", request)
    assert status == 400
    assert "logit_bias" in answer["error"]["message"]


def test_a_client_that_hangs_up_frees_the_worker(
    router: Router, lane: Lane, body: dict[str, Any]
) -> None:
    request = {**body, "prompt": "Once upon a time", "max_tokens": 4000, "ignore_eos": True}
    events = router.events("/v1/completions", request)
    next(events)
    assert _in_flight(lane) == 1
    events.close()  # type: ignore[attr-defined]
    deadline = time.monotonic() + 30
    while _in_flight(lane):
        assert time.monotonic() < deadline, "the worker still generates for nobody"
        time.sleep(0.1)


def _in_flight(lane: Lane) -> float:
    for line in scrape(lane.metrics_port).splitlines():
        if line.startswith("smg_worker_requests_in_flight "):
            return float(line.split()[1])
    raise AssertionError("no such metric")

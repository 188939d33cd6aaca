from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import pytest

from smg_wire.errors import StartError
from smg_wire.observability import WorkerMetrics, configure_tracing

if TYPE_CHECKING:
    from collections.abc import Iterator

FAMILIES = {
    "smg_worker",
    "smg_worker_requests",
    "smg_worker_refusals",
    "smg_worker_requests_in_flight",
    "smg_worker_prompt_tokens",
    "smg_worker_cached_tokens",
    "smg_worker_generation_tokens",
    "smg_worker_time_to_first_token_seconds",
    "smg_worker_inter_token_latency_seconds",
    "smg_worker_request_duration_seconds",
    "smg_worker_state",
}


def families(metrics: WorkerMetrics) -> Iterator[Any]:
    return metrics.registry.collect()


def test_the_families_are_the_same_whatever_the_engine() -> None:
    assert {family.name for family in families(WorkerMetrics("one"))} == FAMILIES
    assert {family.name for family in families(WorkerMetrics("another"))} == FAMILIES


def test_each_family_says_what_it_is() -> None:
    for family in families(WorkerMetrics("one")):
        assert family.documentation.endswith(".")


def test_the_model_is_named_once_it_is_known() -> None:
    metrics = WorkerMetrics("one")
    metrics.set_model("first")
    metrics.set_model("second")
    (info,) = [family for family in families(metrics) if family.name == "smg_worker"]
    assert [sample.labels for sample in info.samples] == [{"engine": "one", "model_name": "second"}]


def test_two_workers_of_one_process_do_not_share_a_registry() -> None:
    one, other = WorkerMetrics("one"), WorkerMetrics("other")
    one.prompt_tokens.inc(5)
    assert other.registry.get_sample_value("smg_worker_prompt_tokens_total") == 0


def test_without_an_endpoint_nothing_is_set_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk", None)
    configure_tracing(None, service="smg-fake")()


def test_an_endpoint_without_the_sdk_is_refused_with_the_install_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.grpc"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(
        sys.modules, "opentelemetry.exporter.otlp.proto.grpc.trace_exporter", raising=False
    )
    with pytest.raises(StartError, match=r"smg-grpc-servicer\[otel\]"):
        configure_tracing("http://127.0.0.1:4317", service="smg-fake")

"""Log format, the Prometheus families that every worker shares, and trace context."""

from __future__ import annotations

import logging
import logging.config
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from opentelemetry import trace
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info

from smg_wire.errors import StartError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from opentelemetry.trace import Span

_SECONDS = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1,
    2.5,
    5,
    10,
    30,
    60,
    120,
    600,
)


def configure_logging(level: str, log_format: str) -> None:
    """Send every logger's lines to standard error, as text or as one JSON object a line."""
    formatter: dict[str, Any] = {
        "format": "%(asctime)s %(levelname)s %(name)s: %(message)s",
    }
    if log_format == "json":
        formatter = {
            "()": "pythonjsonlogger.json.JsonFormatter",
            "fmt": "%(asctime)s %(levelname)s %(name)s %(message)s",
            "rename_fields": {"asctime": "time", "levelname": "level", "name": "logger"},
        }
    logging.config.dictConfig(
        {
            "version": 1,
            "disable_existing_loggers": False,
            "formatters": {"line": formatter},
            "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "line"}},
            "root": {"level": level.upper(), "handlers": ["stderr"]},
        }
    )


class WorkerMetrics:
    """The families, with the labels `engine` and `model_name` bound once the model is known."""

    def __init__(self, engine: str) -> None:
        self.registry = CollectorRegistry()
        self._engine = engine
        self._info = Info(
            "smg_worker",
            "The engine and the model that this worker serves.",
            registry=self.registry,
        )
        self._info.info({"engine": engine, "model_name": ""})
        r = self.registry
        self.requests = Counter(
            "smg_worker_requests", "Requests that ended, by how.", ["finish_reason"], registry=r
        )
        self.refusals = Counter(
            "smg_worker_refusals", "RPCs that ended in an error status.", ["code"], registry=r
        )
        self.in_flight = Gauge(
            "smg_worker_requests_in_flight", "Requests admitted and not ended.", registry=r
        )
        self.prompt_tokens = Counter(
            "smg_worker_prompt_tokens", "Prompt tokens of requests that reached output.", registry=r
        )
        self.cached_tokens = Counter(
            "smg_worker_cached_tokens", "Prompt tokens served from the prefix cache.", registry=r
        )
        self.generation_tokens = Counter(
            "smg_worker_generation_tokens", "Tokens generated.", registry=r
        )
        self.time_to_first_token = Histogram(
            "smg_worker_time_to_first_token_seconds",
            "From admission to the first token.",
            buckets=_SECONDS,
            registry=r,
        )
        self.inter_token = Histogram(
            "smg_worker_inter_token_latency_seconds",
            "Time a generated token took after the one before it.",
            buckets=_SECONDS,
            registry=r,
        )
        self.duration = Histogram(
            "smg_worker_request_duration_seconds",
            "From admission to the end of the request.",
            buckets=_SECONDS,
            registry=r,
        )
        self._state = Gauge(
            "smg_worker_state", "1 for the state that the worker is in.", ["state"], registry=r
        )

    def set_model(self, model_name: str) -> None:
        """Name the model, once it is known."""
        self._info.info({"engine": self._engine, "model_name": model_name})

    def set_state(self, state: str, states: Iterable[str]) -> None:
        """Show `state` as 1 and the other `states` as 0."""
        for name in states:
            self._state.labels(name).set(1 if name == state else 0)


_propagator = TraceContextTextMapPropagator()


def configure_tracing(endpoint: str | None, *, service: str) -> Callable[[], None]:
    """Export spans to an OTLP/gRPC endpoint; return what flushes and ends the export.

    Without an endpoint nothing is set up, and spans cost nothing.

    Raises:
        StartError: an endpoint is given and the OpenTelemetry SDK is not installed.
    """
    if endpoint is None:
        return lambda: None
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise StartError(
            "--otlp-traces-endpoint needs OpenTelemetry's SDK: "
            "pip install 'smg-grpc-servicer[otel]'"
        ) from error
    exporter = OTLPSpanExporter(endpoint=endpoint, insecure=not endpoint.startswith("https"))
    provider = TracerProvider(resource=Resource.create({"service.name": service}))
    provider.add_span_processor(BatchSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    return provider.shutdown


@contextmanager
def server_span(method: str, metadata: Mapping[str, str]) -> Iterator[Span]:
    """Open the span of one RPC, a child of the caller's W3C trace context where there is one."""
    tracer = trace.get_tracer("smg_grpc_servicer")
    parent = _propagator.extract(metadata) if "traceparent" in metadata else None
    # The guard says what went wrong; here it would be grpc's own AbortError in each case.
    with tracer.start_as_current_span(
        method.lstrip("/"),
        context=parent,
        kind=trace.SpanKind.SERVER,
        record_exception=False,
        set_status_on_exception=False,
    ) as span:
        yield span


def trace_headers() -> dict[str, str]:
    """Return the W3C headers of the current span; none where there is no trace."""
    headers: dict[str, str] = {}
    _propagator.inject(headers)
    return headers

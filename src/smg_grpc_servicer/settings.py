"""Every flag and variable of the workers; each worker's `--help` prints its own from here."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, ByteSize, Field, SecretStr, model_validator

from smg_wire.settings import Settings, option

# Protocol buffers cannot carry more in one message.
MAX_MESSAGE_BYTES = 2**31 - 1


def _existing_file(path: Path) -> Path:
    if not path.is_file():
        raise ValueError("no such file")
    return path


def _finite(value: float) -> float:
    if value != value or value in (float("inf"), float("-inf")):
        raise ValueError("must be a finite number")
    return value


KEY_LIMIT = "must be printable ASCII characters without spaces, at least one"


def sendable(key: str) -> bool:
    """Say whether this can be an API key, see `KEY_LIMIT`."""
    # An empty key would let everyone in, and metadata cannot carry the others.
    return bool(key) and all("!" <= character <= "~" for character in key)


def _sendable(key: SecretStr) -> SecretStr:
    if not sendable(key.get_secret_value()):
        raise ValueError(KEY_LIMIT)
    return key


ApiKey = Annotated[SecretStr, AfterValidator(_sendable)]
ExistingFile = Annotated[Path, AfterValidator(_existing_file)]
Port = Annotated[int, Field(ge=0, le=65535)]
Seconds = Annotated[float, AfterValidator(_finite), Field(ge=0)]
PositiveSeconds = Annotated[float, AfterValidator(_finite), Field(gt=0)]


class ServingSettings(Settings):
    """Serve an engine over gRPC: what every worker takes."""

    # OpenTelemetry's own variables, the later one wins.
    foreign_variables: ClassVar[dict[str, str]] = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": "otlp_traces_endpoint",
        "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "otlp_traces_endpoint",
    }

    host: str = option("127.0.0.1", help="Address to listen on; 0.0.0.0 for all.")
    port: Port = option(50051, help="gRPC port; 0 picks a free one and logs it.")
    metrics_port: Port | None = option(
        None, help="Serve Prometheus metrics over HTTP on this port; off when unset."
    )
    api_key: ApiKey | None = option(
        None,
        help="Require 'authorization: Bearer KEY' on every RPC but grpc.health.v1. Prefer the "
        "variable: flags show in process lists.",
    )
    ssl_certfile: ExistingFile | None = option(
        None, help="PEM certificate chain; with --ssl-keyfile it turns TLS on."
    )
    ssl_keyfile: ExistingFile | None = option(None, help="PEM private key of --ssl-certfile.")
    ssl_ca_certs: ExistingFile | None = option(
        None, help="PEM bundle; clients must then present a certificate signed by it (mutual TLS)."
    )
    max_message_bytes: ByteSize = option(
        ByteSize(256 * 1024**2),
        ge=1024,
        le=MAX_MESSAGE_BYTES,
        help="Largest gRPC message, in and out, in bytes or with a unit (64MiB).",
    )
    reflection: bool = option(True, help="Serve gRPC reflection.")
    max_queued_requests: int = option(
        2048,
        ge=0,
        help="Requests that may wait for a slot of the engine; one more is refused with "
        "RESOURCE_EXHAUSTED.",
    )
    drain_timeout: Seconds = option(
        30.0, help="Seconds that running requests may take to end after SIGTERM."
    )
    log_level: Literal["debug", "info", "warning", "error"] = option(
        "info", help="Least severe level that is logged."
    )
    log_format: Literal["text", "json"] = option("text", help="Log lines as text or as JSON.")
    otlp_traces_endpoint: str | None = option(
        None,
        help="Export OpenTelemetry spans over OTLP/gRPC to this endpoint (needs the otel extra).",
    )

    @model_validator(mode="after")
    def _tls_is_whole(self) -> ServingSettings:
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            raise ValueError("--ssl-certfile and --ssl-keyfile go together")
        if self.ssl_ca_certs is not None and self.ssl_certfile is None:
            raise ValueError("--ssl-ca-certs needs --ssl-certfile and --ssl-keyfile")
        return self


class MlxSettings(ServingSettings):
    """Serve a model with MLX over mlx.grpc.engine.MlxEngine."""

    foreign_variables: ClassVar[dict[str, str]] = {
        **ServingSettings.foreign_variables,
        "MLX_COALESCE_MS": "coalesce_ms",
        "MLX_PREFILL_STEP": "prefill_step_size",
    }

    model: str = option(help="Model directory, or the name of a model in the local hub cache.")
    served_model_name: str | None = option(
        None, help="Name that GetModelInfo reports; the value of --model when unset."
    )
    adapter_path: Path | None = option(None, help="LoRA adapter directory to apply at start.")
    prefill_batch_size: int = option(8, ge=1, le=1024, help="Prompts that are prefilled together.")
    completion_batch_size: int = option(
        32, ge=1, le=4096, help="Requests that are decoded together: the worker's slots."
    )
    prefill_step_size: int | None = option(
        None,
        ge=1,
        le=1_000_000,
        help="Prompt tokens a prompt gives to one step; 2048 on Metal and 512 on CPU when unset.",
    )
    prefix_cache_bytes: ByteSize = option(
        ByteSize(1024**3),
        ge=0,
        help="Memory for KV caches kept across requests, in bytes or with a unit; 0 is off.",
    )
    coalesce_ms: Annotated[float, AfterValidator(_finite), Field(ge=0, le=1000)] = option(
        8.0,
        help="Milliseconds at most that an idle engine waits for more requests to start with the "
        "first; a lone one waits a quarter of it.",
    )
    max_logprobs: int = option(20, ge=0, le=1000, help="Most alternatives a request may ask for.")
    stall_timeout: PositiveSeconds = option(
        120.0,
        help="Seconds without a step, beyond what the step's prompt tokens take, after which the "
        "engine counts as dead.",
    )


class VllmSettings(ServingSettings):
    """Serve a model with vLLM over vllm.grpc.engine.VllmEngine.

    The engine's own flags are vLLM's; these stand beside them. Under `vllm serve --grpc`, whose
    flags are all vLLM's, they are variables only.
    """

    foreign_variables: ClassVar[dict[str, str]] = {
        **ServingSettings.foreign_variables,
        "SMG_VLLM_SERVICER_KV_EVENTS": "kv_events",
        "VLLM_API_KEY": "api_key",
    }

    kv_events: bool = option(
        True,
        help="Switch vLLM's KV event publisher on, on this host only, unless --kv-events-config "
        "says otherwise.",
    )
    pairing_protocol: str | None = option(
        None,
        help="What a prefill and a decode worker must both name to be paired by the router; "
        "reported by GetServerInfo.",
    )

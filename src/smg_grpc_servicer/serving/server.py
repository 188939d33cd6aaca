"""The gRPC server of a worker: channel options, the port, TLS, reflection, the metrics port."""

from __future__ import annotations

import logging
import ssl
from typing import TYPE_CHECKING, Any

import grpc
from grpc_health.v1 import health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from prometheus_client import start_http_server

from smg_grpc_servicer.serving.health import Health, HealthServicer
from smg_grpc_servicer.serving.interceptors import Guard, GuardInterceptor
from smg_wire.errors import StartError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from smg_grpc_servicer.settings import ServingSettings
    from smg_wire.observability import WorkerMetrics

_logger = logging.getLogger(__name__)

_HEALTH_SERVICE = "grpc.health.v1.Health"


def channel_options(max_message_bytes: int) -> list[tuple[str, Any]]:
    """Return the server's channel arguments (names: grpc/impl/channel_arg_names.h)."""
    return [
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.max_receive_message_length", max_message_bytes),
        # Two workers on one port would each get half of the connections: refuse the second.
        ("grpc.so_reuseport", 0),
        # A client may ping every second through a prefill that is silent for ten minutes.
        ("grpc.http2.min_ping_interval_without_data_ms", 500),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.keepalive_permit_without_calls", 1),
        # A client whose host vanished is found within a minute, and its requests are freed.
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 20_000),
        ("grpc.http2.max_pings_without_data", 0),
    ]


def build_server(
    settings: ServingSettings,
    *,
    health: Health,
    metrics: WorkerMetrics,
    services: Sequence[str],
    register: Callable[[grpc.aio.Server], None],
) -> grpc.aio.Server:
    """Return a server with the worker's services, health and reflection behind the guard."""
    keys = [settings.api_key.get_secret_value()] if settings.api_key else []
    server = grpc.aio.server(
        interceptors=[GuardInterceptor(Guard(metrics=metrics, api_keys=keys))],
        options=channel_options(int(settings.max_message_bytes)),
    )
    register(server)
    health_pb2_grpc.add_HealthServicer_to_server(HealthServicer(health, services), server)
    if settings.reflection:
        names = (*services, _HEALTH_SERVICE, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, server)
    return server


def bind(server: grpc.aio.Server, settings: ServingSettings) -> int:
    """Bind the gRPC port and return it.

    Raises:
        StartError: the address is in use or not ours, or the TLS files do not fit together.
    """
    address = f"[{settings.host}]" if ":" in settings.host else settings.host
    address = f"{address}:{settings.port}"
    try:
        if settings.ssl_certfile is None:
            port = server.add_insecure_port(address)
        else:
            port = server.add_secure_port(address, _credentials(settings))
    except RuntimeError as error:
        reason = _tls_problem(settings) or "is the port in use, and the address this machine's?"
        raise StartError(f"cannot listen on {address}: {reason}") from error
    if port == 0:
        raise StartError(f"cannot listen on {address}")
    return port


def _credentials(settings: ServingSettings) -> grpc.ServerCredentials:
    certificate, key, clients = settings.ssl_certfile, settings.ssl_keyfile, settings.ssl_ca_certs
    assert certificate is not None  # noqa: S101  (settings refuse one without the other)
    assert key is not None  # noqa: S101
    try:
        return grpc.ssl_server_credentials(
            [(key.read_bytes(), certificate.read_bytes())],
            root_certificates=clients.read_bytes() if clients else None,
            require_client_auth=clients is not None,
        )
    except OSError as error:
        raise StartError(f"cannot read {error.filename}: {error.strerror}") from error


def _tls_problem(settings: ServingSettings) -> str | None:
    """Return which TLS file is wrong, which gRPC does not say, or None."""
    certificate, key, clients = settings.ssl_certfile, settings.ssl_keyfile, settings.ssl_ca_certs
    if certificate is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # Without a passphrase given here OpenSSL would ask for one on the terminal.
        context.load_cert_chain(certificate, key, password="")
    except OSError:
        return (
            f"--ssl-certfile {certificate} and --ssl-keyfile {key} must be a certificate in PEM "
            "and the key that belongs to it, without a passphrase"
        )
    if clients is not None:
        try:
            context.load_verify_locations(clients)
        except OSError:
            return f"--ssl-ca-certs {clients} must hold certificates in PEM"
    return None


def start_metrics(settings: ServingSettings, metrics: WorkerMetrics) -> Callable[[], None]:
    """Serve /metrics where a port is set; return what stops it.

    Raises:
        StartError: the port is in use.
    """
    if settings.metrics_port is None:
        return lambda: None
    try:
        http, thread = start_http_server(
            settings.metrics_port, addr=settings.host, registry=metrics.registry
        )
    except OSError as error:
        raise StartError(
            f"--metrics-port {settings.metrics_port} cannot be used: {error.strerror}"
        ) from error
    _logger.info("metrics on http://%s:%d/metrics", settings.host, http.server_port)

    def stop() -> None:
        http.shutdown()
        http.server_close()
        thread.join()

    return stop

from __future__ import annotations

import asyncio
import urllib.error
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from smg_grpc_proto.generated import mlx_engine_pb2 as pb
from smg_grpc_proto.generated import mlx_engine_pb2_grpc
from tests.support.certificates import Authority, write_pair
from tests.support.processes import free_port, scrape
from tests.unit.serving.conftest import descriptors

from smg_grpc_servicer.serving.server import bind, build_server, start_metrics
from smg_grpc_servicer.settings import ServingSettings
from smg_wire.errors import StartError

if TYPE_CHECKING:
    from pathlib import Path

    from tests.unit.serving.conftest import Bench

Code = grpc.StatusCode
NOT_SERVING = 2
UNLIMITED = (("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1))


class Echo(mlx_engine_pb2_grpc.MlxEngineServicer):
    """Answers with as many bytes as it got; a stream stays silent for that many milliseconds."""

    async def GetModelInfo(self, request: Any, context: Any) -> Any:
        return pb.GetModelInfoResponse()

    async def Abort(self, request: pb.AbortRequest, context: Any) -> Any:
        return pb.AbortResponse()

    async def HealthCheck(self, request: Any, context: Any) -> Any:
        size = int(dict(context.invocation_metadata())["size"])
        return pb.HealthCheckResponse(message="x" * size)

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> None:
        await asyncio.sleep(len(request.text) / 1000)
        await context.write(pb.GenerateResponse())


def register(server: grpc.aio.Server) -> None:
    mlx_engine_pb2_grpc.add_MlxEngineServicer_to_server(Echo(), server)


async def echo(bench: Bench, *options: tuple[str, Any], **settings: Any) -> Any:
    await bench.serve(register, **settings)
    return mlx_engine_pb2_grpc.MlxEngineStub(bench.channel(*options))


async def failure(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await asyncio.wait_for(call, 20)
    return caught.value


def sized(total: int) -> pb.AbortRequest:
    """A message of exactly so many bytes, for totals from 200 to 16384 and in the millions."""
    message = pb.AbortRequest(request_ids=["x" * total])
    excess = message.ByteSize() - total
    message = pb.AbortRequest(request_ids=["x" * (total - excess)])
    assert message.ByteSize() == total
    return message


# Message limits.


async def test_five_megabytes_pass_in_both_directions_by_default(bench: Bench) -> None:
    stub = await echo(bench, *UNLIMITED)
    await stub.Abort(sized(5_000_000))
    answer = await stub.HealthCheck(pb.HealthCheckRequest(), metadata=(("size", "5000000"),))
    assert len(answer.message) == 5_000_000


async def test_a_message_of_the_limit_passes_and_one_byte_more_names_the_limit(
    bench: Bench,
) -> None:
    stub = await echo(bench, *UNLIMITED, max_message_bytes=10_000)
    await stub.Abort(sized(10_000))
    error = await failure(stub.Abort(sized(10_001)))
    assert error.code() is Code.RESOURCE_EXHAUSTED
    assert "10001" in (error.details() or "")
    assert "10000" in (error.details() or "")


async def test_an_answer_above_the_limit_names_the_limit(bench: Bench) -> None:
    stub = await echo(bench, *UNLIMITED, max_message_bytes=10_000)
    call = stub.HealthCheck(pb.HealthCheckRequest(), metadata=(("size", "10001"),))
    error = await failure(call)
    assert error.code() is Code.RESOURCE_EXHAUSTED
    assert "10000" in (error.details() or "")


async def test_a_message_above_the_limit_costs_nobody_else_anything(bench: Bench) -> None:
    stub = await echo(bench, *UNLIMITED, max_message_bytes=10_000)
    other = mlx_engine_pb2_grpc.MlxEngineStub(bench.channel())
    running = asyncio.ensure_future(_read(other.Generate(pb.GenerateRequest(text="x" * 300))))
    await failure(stub.Abort(sized(50_000)))
    await stub.Abort(sized(1000))
    assert len(await running) == 1


async def _read(call: Any) -> list[Any]:
    return [message async for message in call]


# Keepalive.


@pytest.mark.slow
async def test_pings_every_second_through_a_silent_stream_are_tolerated(bench: Bench) -> None:
    stub = await echo(
        bench,
        ("grpc.keepalive_time_ms", 1000),
        ("grpc.keepalive_timeout_ms", 1000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    )
    # A server that counts pings as strikes hangs up at the third: after some four seconds.
    assert len(await _read(stub.Generate(pb.GenerateRequest(text="x" * 12_000)))) == 1


def test_the_options_tolerate_pings_and_refuse_a_shared_port() -> None:
    from smg_grpc_servicer.serving.server import channel_options

    options = dict(channel_options(12345))
    assert options["grpc.so_reuseport"] == 0
    assert options["grpc.http2.max_ping_strikes"] == 0
    assert options["grpc.http2.min_ping_interval_without_data_ms"] < 1000
    assert options["grpc.keepalive_permit_without_calls"] == 1
    assert options["grpc.max_send_message_length"] == 12345
    assert options["grpc.max_receive_message_length"] == 12345


# Ports.


def _bound(bench: Bench, **settings: Any) -> int:
    values = ServingSettings(**settings)
    server = build_server(
        values, health=bench.health, metrics=bench.metrics, services=[], register=register
    )
    return bind(server, values)


async def test_a_port_in_use_is_refused_by_its_address(bench: Bench) -> None:
    await bench.serve()
    port = int(bench.address.rsplit(":", 1)[1])
    with pytest.raises(StartError, match=f"127.0.0.1:{port}"):
        _bound(bench, port=port)


async def test_an_address_of_another_machine_is_refused(bench: Bench) -> None:
    with pytest.raises(StartError, match=r"192\.0\.2\.1"):
        _bound(bench, port=0, host="192.0.2.1")


async def test_an_ipv6_address_is_taken_without_brackets(bench: Bench) -> None:
    try:
        port = _bound(bench, port=0, host="::1")
    except StartError:
        pytest.skip("this machine has no IPv6")
    assert port > 0


async def test_a_metrics_server_stops_and_leaves_nothing(bench: Bench) -> None:
    port = free_port()
    settings = ServingSettings(metrics_port=port)
    start_metrics(settings, bench.metrics)()
    before = descriptors()
    for _ in range(5):
        stop = start_metrics(settings, bench.metrics)
        with pytest.raises(StartError, match=f"--metrics-port {port}"):
            start_metrics(settings, bench.metrics)
        assert "smg_worker_info" in await asyncio.to_thread(scrape, port)
        stop()
    with pytest.raises(urllib.error.URLError):
        await asyncio.to_thread(scrape, port)
    assert descriptors() == before


# TLS.


def _check(channel: grpc.aio.Channel) -> Any:
    return health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=10)


async def _status(address: str, credentials: grpc.ChannelCredentials) -> Any:
    async with grpc.aio.secure_channel(address, credentials) as channel:
        return (await _check(channel)).status


async def test_tls_serves_those_who_trust_it_and_nobody_in_the_clear(
    bench: Bench, tmp_path: Path
) -> None:
    authority = Authority("ours")
    certificate, key = write_pair(tmp_path, authority.issue("worker"))
    plain = await bench.serve(ssl_certfile=certificate, ssl_keyfile=key)
    trusting = grpc.ssl_channel_credentials(authority.pem)
    assert await _status(bench.address, trusting) == NOT_SERVING
    assert (await failure(_check(plain))).code() is Code.UNAVAILABLE
    stranger = grpc.ssl_channel_credentials(Authority("another").pem)
    assert (await failure(_status(bench.address, stranger))).code() is Code.UNAVAILABLE


async def test_mutual_tls_serves_only_clients_with_a_certificate(
    bench: Bench, tmp_path: Path
) -> None:
    ours, clients, strangers = Authority("ours"), Authority("clients"), Authority("strangers")
    certificate, key = write_pair(tmp_path, ours.issue("worker"))
    bundle = tmp_path / "clients.pem"
    bundle.write_bytes(clients.pem)
    await bench.serve(ssl_certfile=certificate, ssl_keyfile=key, ssl_ca_certs=str(bundle))
    client_certificate, client_key = clients.issue("router")
    known = grpc.ssl_channel_credentials(ours.pem, client_key, client_certificate)
    assert await _status(bench.address, known) == NOT_SERVING
    stranger_certificate, stranger_key = strangers.issue("router")
    stranger = grpc.ssl_channel_credentials(ours.pem, stranger_key, stranger_certificate)
    assert (await failure(_status(bench.address, stranger))).code() is Code.UNAVAILABLE
    nobody = grpc.ssl_channel_credentials(ours.pem)
    assert (await failure(_status(bench.address, nobody))).code() is Code.UNAVAILABLE


async def test_a_key_of_another_certificate_is_refused(bench: Bench, tmp_path: Path) -> None:
    authority = Authority("ours")
    certificate, _ = authority.issue("worker")
    _, key = authority.issue("another")
    paths = write_pair(tmp_path, (certificate, key))
    with pytest.raises(StartError):
        _bound(bench, port=0, ssl_certfile=paths[0], ssl_keyfile=paths[1])


async def test_a_file_that_vanished_since_the_settings_is_named(
    bench: Bench, tmp_path: Path
) -> None:
    paths = write_pair(tmp_path, Authority("ours").issue("worker"))
    settings = ServingSettings(port=0, ssl_certfile=paths[0], ssl_keyfile=paths[1])
    (tmp_path / "key.pem").unlink()
    server = build_server(
        settings, health=bench.health, metrics=bench.metrics, services=[], register=register
    )
    with pytest.raises(StartError, match=r"key\.pem"):
        bind(server, settings)

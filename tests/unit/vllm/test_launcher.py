from __future__ import annotations

import argparse
import socket
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from smg_grpc_servicer.settings import VllmSettings
from smg_grpc_servicer.vllm import launcher
from smg_wire.errors import SettingsError, StartError

if TYPE_CHECKING:
    from pathlib import Path


def flags(**given: Any) -> argparse.Namespace:
    """Flags as `vllm serve --grpc` parses them, nothing given but these."""
    unset = {
        "host": None,
        "port": 50051,
        "api_key": None,
        "ssl_keyfile": None,
        "ssl_certfile": None,
        "ssl_ca_certs": None,
        "ssl_ciphers": None,
        "ssl_cert_reqs": 0,
        "enable_ssl_refresh": False,
        "uds": None,
    }
    return argparse.Namespace(**{**unset, **given})


def serve_grpc(module: str, args: argparse.Namespace) -> argparse.Namespace | None:
    """What `arguments` finds when a coroutine of this name in a module of that name calls it."""
    code = "def serve_grpc(args):\n    return find()\n"
    scope: dict[str, Any] = {"__name__": module, "find": launcher.arguments}
    exec(code, scope)  # noqa: S102 - a module of another name cannot be had otherwise
    found: argparse.Namespace | None = scope["serve_grpc"](args)
    return found


@pytest.mark.parametrize(
    "module", ["vllm.entrypoints.launchers.grpc_server", "vllm.entrypoints.grpc_server"]
)
def test_the_launchers_flags_are_found_from_below_it(module: str) -> None:
    given = flags()
    assert serve_grpc(module, given) is given


def test_a_coroutine_of_that_name_elsewhere_is_not_the_launcher() -> None:
    assert serve_grpc("somebody.elses", flags()) is None
    assert launcher.arguments() is None


def test_the_address_is_the_launchers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SMG_PORT", "1")
    settings = launcher.launch(flags(port=50099)).settings
    assert (settings.host, settings.port) == ("0.0.0.0", 50099)
    assert launcher.launch(flags(host="127.0.0.1")).settings.host == "127.0.0.1"


@pytest.mark.parametrize(
    ("given", "ours", "vllms", "keys"),
    [
        (None, None, None, ()),
        (None, "ours", None, ("ours",)),
        (None, None, "vllms", ("vllms",)),
        (None, "ours", "vllms", ("ours",)),
        (["one", "two"], "ours", "vllms", ("one", "two")),
    ],
)
def test_a_key_is_taken_from_wherever_it_is_configured(
    monkeypatch: pytest.MonkeyPatch,
    given: list[str] | None,
    ours: str | None,
    vllms: str | None,
    keys: tuple[str, ...],
) -> None:
    for name, value in (("SMG_API_KEY", ours), ("VLLM_API_KEY", vllms)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    assert launcher.launch(flags(api_key=given)).api_keys == keys


@pytest.mark.parametrize("keys", [[""], ["two words"], ["fine", "\N{SNOWMAN}"]])
def test_a_key_that_cannot_be_presented_is_refused_without_showing_it(keys: list[str]) -> None:
    with pytest.raises(SettingsError) as caught:
        launcher.launch(flags(api_key=keys))
    assert "--api-key" in caught.value.message
    assert keys[-1] == "" or keys[-1] not in caught.value.message


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ssl_keyfile", "k.pem"),
        ("ssl_certfile", "c.pem"),
        ("ssl_ca_certs", "a.pem"),
        ("ssl_ciphers", "HIGH"),
        ("ssl_cert_reqs", 2),
        ("enable_ssl_refresh", True),
        ("uds", "/run/vllm.sock"),
    ],
)
def test_a_flag_that_the_launcher_would_ignore_is_refused(name: str, value: object) -> None:
    with pytest.raises(SettingsError) as caught:
        launcher.launch(flags(**{name: value}))
    assert f"--{name.replace('_', '-')} " in caught.value.message
    assert launcher.OURS in caught.value.message


def test_our_tls_variables_are_refused_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("CERTFILE", "KEYFILE"):
        file = tmp_path / name
        file.touch()
        monkeypatch.setenv(f"SMG_SSL_{name}", str(file))
    with pytest.raises(SettingsError, match="SMG_SSL_CERTFILE"):
        launcher.launch(flags())


def test_a_port_on_which_somebody_listens_is_refused_even_if_it_may_be_shared() -> None:
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        settings = VllmSettings(host="127.0.0.1", port=port)
        with pytest.raises(StartError, match=f"127.0.0.1:{port}"):
            launcher.check_port(settings)
    launcher.check_port(settings)


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(StartError, match=r"192\.0\.2\.1"):
        launcher.check_port(VllmSettings(host="192.0.2.1", port=50051))


@pytest.mark.parametrize(
    ("error", "code"), [(SettingsError("a flag"), 2), (StartError("a port"), 3)]
)
def test_a_refusal_is_one_line_and_an_exit_code(
    capsys: pytest.CaptureFixture[str], error: SettingsError | StartError, code: int
) -> None:
    with pytest.raises(SystemExit) as caught:
        launcher.refuse(error)
    assert caught.value.code == code
    assert capsys.readouterr().err == f"error: {error.message}\n"


async def test_the_next_server_and_no_other_is_shaped() -> None:
    seen: list[str] = []

    class Spy(grpc.aio.ServerInterceptor):
        async def intercept_service(self, continuation: Any, details: Any) -> Any:
            seen.append(details.method)
            return await continuation(details)

    build = grpc.aio.server
    launcher.shape_next_server(Spy(), VllmSettings())
    shared = [("grpc.so_reuseport", 1), ("grpc.max_receive_message_length", -1)]
    first, second = grpc.aio.server(options=shared), grpc.aio.server(options=shared)
    assert grpc.aio.server is build
    try:
        port = first.add_insecure_port("127.0.0.1:0")
        # The options are ours: this port cannot be shared.
        with pytest.raises(RuntimeError):
            second.add_insecure_port(f"127.0.0.1:{port}")
        ports = [port, second.add_insecure_port("127.0.0.1:0")]
        for server, number in zip((first, second), ports, strict=True):
            await server.start()
            async with grpc.aio.insecure_channel(f"127.0.0.1:{number}") as channel:
                with pytest.raises(grpc.aio.AioRpcError):
                    await channel.unary_unary(f"/service/on-{number}")(b"")
        assert seen == [f"/service/on-{port}"]
    finally:
        await first.stop(None)
        await second.stop(None)

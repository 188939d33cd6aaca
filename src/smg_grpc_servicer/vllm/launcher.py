"""What vLLM's own gRPC launcher gives a servicer, and what it leaves out.

`vllm serve --grpc` and `python -m vllm.entrypoints.launchers.grpc_server` parse the flags, build
the server and wait for a signal, all in one coroutine, and hand us the engine client alone. Its
flags are read from that coroutine's frame: nothing of vLLM is changed for it, and outside of it
nothing is found. The server that it builds next gets our channel options and our interceptor.
"""

from __future__ import annotations

import logging
import socket
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import grpc

from smg_grpc_servicer.serving.lifecycle import EXIT_SETTINGS, EXIT_START
from smg_grpc_servicer.serving.server import channel_options
from smg_grpc_servicer.settings import KEY_LIMIT, VllmSettings, sendable
from smg_wire.errors import SettingsError, SmgError, StartError
from smg_wire.settings import load

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence
    from types import FrameType

_logger = logging.getLogger(__name__)

# The launcher's module from 0.30 on, and before.
_MODULES = ("vllm.entrypoints.launchers.grpc_server", "vllm.entrypoints.grpc_server")
_COROUTINE = "serve_grpc"
OURS = "python -m smg_grpc_servicer.vllm"

# Flags of vLLM's HTTP server that would make its gRPC server safer or reachable elsewhere, and
# that its launcher accepts and does not read. Attribute, what an unset one holds.
_UNREAD = {
    "ssl_keyfile": None,
    "ssl_certfile": None,
    "ssl_ca_certs": None,
    "ssl_ciphers": None,
    "ssl_cert_reqs": 0,
    "enable_ssl_refresh": False,
    "uds": None,
}
# Ours that need a server of our own.
_NEED_OUR_SERVER = ("ssl_certfile", "ssl_keyfile", "ssl_ca_certs")


@dataclass(frozen=True)
class Launch:
    """What a worker under vLLM's launcher runs with."""

    settings: VllmSettings
    api_keys: tuple[str, ...]


def arguments() -> argparse.Namespace | None:
    """Return the flags of vLLM's gRPC launcher if it is among our callers, else None."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == _COROUTINE and _module(frame) in _MODULES:
            found: argparse.Namespace | None = frame.f_locals.get("args")
            return found
        frame = frame.f_back
    return None


def _module(frame: FrameType) -> str:
    # Run with -m the module is called __main__, and its spec has the name.
    spec = frame.f_globals.get("__spec__")
    name: str = getattr(spec, "name", None) or frame.f_globals.get("__name__", "")
    return name


def launch(flags: argparse.Namespace) -> Launch:
    """Return the settings under these flags of vLLM's launcher.

    Raises:
        SettingsError: a variable holds what it may not hold, or a flag or a variable asks for
            what this launcher cannot give.
    """
    for name, unset in _UNREAD.items():
        if getattr(flags, name, unset) != unset:
            raise SettingsError(
                f"--{name.replace('_', '-')} has no effect on vLLM's gRPC launcher: start "
                f"{OURS}, or drop the flag"
            )
    argv = ["--host", flags.host or "0.0.0.0", "--port", str(flags.port)]
    settings = load(VllmSettings, argv, prog="vllm serve --grpc")
    for name in _NEED_OUR_SERVER:
        if getattr(settings, name) is not None:
            raise SettingsError(
                f"SMG_{name.upper()} has no effect on vLLM's gRPC launcher: start {OURS}, or "
                "unset the variable"
            )
    return Launch(settings, _keys(flags, settings))


def _keys(flags: argparse.Namespace, settings: VllmSettings) -> tuple[str, ...]:
    keys = getattr(flags, "api_key", None) or ()
    if isinstance(keys, str):
        keys = (keys,)
    if not all(map(sendable, keys)):
        raise SettingsError(f"--api-key is hidden: {KEY_LIMIT}")
    if not keys and settings.api_key is not None:
        return (settings.api_key.get_secret_value(),)
    return tuple(keys)


def check_port(settings: VllmSettings) -> None:
    """Check that nobody listens on the gRPC port.

    vLLM's launcher lets ports be shared: two workers on one would each get half of the
    connections.

    Raises:
        StartError: somebody does, or the address is not this machine's.
    """
    if settings.port == 0:
        return
    try:
        found = socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        family, kind, protocol, _, address = found[0]
        with socket.socket(family, kind, protocol) as probe:
            # As gRPC does, so that connections of a worker that has just ended do not matter.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen(1)
    except OSError as error:
        raise StartError(
            f"cannot listen on {settings.host}:{settings.port}: {error.strerror or error}"
        ) from error


def refuse(error: SmgError) -> NoReturn:
    """End a start under vLLM's launcher: one line, and the exit code of our own launcher."""
    print(f"error: {error.message}", file=sys.stderr, flush=True)
    raise SystemExit(EXIT_SETTINGS if isinstance(error, SettingsError) else EXIT_START)


def shape_next_server(interceptor: grpc.aio.ServerInterceptor, settings: VllmSettings) -> None:
    """Give the one server that is built next in this process our interceptor and options.

    The launcher builds it right after its servicer, without waiting in between. If a release of
    vLLM builds it before, this finds no server, and the servicers' own guards are what is left.
    """
    build: Any = grpc.aio.server

    def server(
        *positional: Any,
        options: Sequence[tuple[str, Any]] | None = None,
        interceptors: Sequence[grpc.aio.ServerInterceptor] | None = None,
        **named: Any,
    ) -> grpc.aio.Server:
        grpc.aio.server = build
        ours = channel_options(int(settings.max_message_bytes))
        theirs = [(name, value) for name, value in options or () if name not in dict(ours)]
        made: grpc.aio.Server = build(
            *positional,
            options=[*theirs, *ours],
            interceptors=[interceptor, *(interceptors or ())],
            **named,
        )
        return made

    grpc.aio.server = server

"""vLLM general plugin: what must be set before vLLM's gRPC launcher builds its engine.

vLLM calls `register` in every process of the environment: HTTP servers, offline engines, engine
cores. It does nothing there but look at the command line. In a process that may become the gRPC
launcher it wraps `AsyncLLM.from_vllm_config`, and the wrapper acts only when that launcher calls
it: it refuses early what could not be served, turns the KV event publisher on, and keeps the
scheduler's statistics when logging them is off.
"""

from __future__ import annotations

import atexit
import functools
import logging
import multiprocessing
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smg_wire.errors import SmgError

if TYPE_CHECKING:
    from vllm.config import KVEventsConfig, VllmConfig
    from vllm.engine.protocol import EngineClient
    from vllm.v1.engine.async_llm import AsyncLLM

    from smg_grpc_servicer.settings import VllmSettings

_logger = logging.getLogger(__name__)

_MODULES = ("vllm.entrypoints.launchers.grpc_server", "vllm.entrypoints.grpc_server")
_MARK = "_smg_grpc_servicer"

_directories: list[Path] = []


def register() -> None:
    """Prepare this process for vLLM's gRPC launcher if it may become one. May be called twice."""
    if not _may_become_the_launcher():
        return
    from vllm.v1.engine.async_llm import AsyncLLM

    if hasattr(AsyncLLM, _MARK):
        return
    setattr(AsyncLLM, _MARK, True)
    build = AsyncLLM.from_vllm_config

    @functools.wraps(build)
    def from_vllm_config(
        cls: type[AsyncLLM], vllm_config: VllmConfig, *positional: Any, **named: Any
    ) -> AsyncLLM:
        del cls
        if not positional:
            _prepare(vllm_config, named)
        return build(vllm_config, *positional, **named)

    AsyncLLM.from_vllm_config = classmethod(from_vllm_config)


def _may_become_the_launcher() -> bool:
    """Say whether this is the main process of `vllm serve` or of the launcher's own module."""
    if multiprocessing.parent_process() is not None:
        return False
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    # While -m looks for its module, argv holds the flag itself.
    if getattr(spec, "name", "") in _MODULES:
        return True
    # --grpc may stand in a file that --config names, so `serve` is all that can be asked for.
    return "serve" in sys.argv[1:2]


def _prepare(vllm_config: VllmConfig, named: dict[str, Any]) -> None:
    from smg_grpc_servicer.vllm import launcher

    flags = launcher.arguments()
    if flags is None:
        return
    try:
        settings = launcher.launch(flags).settings
        # Again when the servicer is built; here it is found before the model is loaded.
        launcher.check_port(settings)
    except SmgError as error:
        launcher.refuse(error)
    turn_kv_events_on(vllm_config, settings)
    keep_statistics(named)


def turn_kv_events_on(vllm_config: VllmConfig, settings: VllmSettings) -> None:
    """Have the engine publish its KV events on this host, unless its operator configured that.

    The publisher binds sockets in a directory that only this user can enter. Ranks on other
    hosts could not be reached through it, so then it stays off.
    """
    if not settings.kv_events or vllm_config.kv_events_config is not None:
        return
    parallel = vllm_config.parallel_config
    elsewhere = parallel.data_parallel_size_local < parallel.data_parallel_size
    if elsewhere or parallel.data_parallel_backend == "ray":
        _logger.warning(
            "KV events stay off: ranks on other hosts need addresses, see --kv-events-config"
        )
        return
    if not vllm_config.cache_config.enable_prefix_caching:
        return
    from vllm.config import KVEventsConfig

    directory = _private_directory()
    # vLLM gives each rank an address of its own by a suffix, and does that for paths only when
    # they contain "inproc".
    vllm_config.kv_events_config = KVEventsConfig(
        enable_kv_cache_events=True,
        publisher="zmq",
        endpoint=f"ipc://{directory}/inproc-events",
        replay_endpoint=f"ipc://{directory}/inproc-replay",
    )


def _private_directory() -> Path:
    # A socket's path holds 107 bytes, and TMPDIR may be longer than that alone.
    directory = Path(tempfile.mkdtemp(prefix="smg-vllm-"))
    if len(str(directory)) > 80:
        directory.rmdir()
        directory = Path(tempfile.mkdtemp(prefix="smg-vllm-", dir="/tmp"))
    _directories.append(directory)
    return directory


@atexit.register
def remove_directories() -> None:
    """Remove what the publishers' sockets lay in. For those who leave without an orderly exit."""
    while _directories:
        shutil.rmtree(_directories.pop(), ignore_errors=True)


def keep_statistics(named: dict[str, Any]) -> None:
    """Keep the scheduler's statistics, which GetLoads needs, when logging them is off.

    `--disable-log-stats` also stops the engine from counting. With a logger of somebody else
    it counts and logs nothing.
    """
    if named.get("disable_log_stats") and not named.get("stat_loggers"):
        named["stat_loggers"] = [_silent_logger()]


def _silent_logger() -> type[Any]:
    from vllm.v1.metrics.loggers import StatLoggerBase

    def do_nothing(*positional: Any, **named: Any) -> None:
        del positional, named

    methods = dict.fromkeys(("__init__", "record", "log_engine_initialized"), do_nothing)
    return type("SilentStatLogger", (StatLoggerBase,), methods)


def kv_events_config(vllm_config: VllmConfig) -> KVEventsConfig | None:
    """Return where the engine publishes its KV events, or None when it does not over ZMQ.

    The addresses are rank 0's; `ZmqEventPublisher.offset_endpoint_port` gives another rank's.
    """
    found = vllm_config.kv_events_config
    if found is None or not found.enable_kv_cache_events or found.publisher != "zmq":
        return None
    return found


def report_kv_events(engine_client: EngineClient, settings: VllmSettings) -> None:
    """Log where KV events are published, or that they are not because of vLLM's plugins."""
    found = kv_events_config(engine_client.vllm_config)
    if found is not None:
        _logger.info("KV events are published at %s", found.endpoint)
        return
    from vllm.v1.engine.async_llm import AsyncLLM

    if settings.kv_events and not hasattr(AsyncLLM, _MARK):
        _logger.warning(
            "KV events are off: vLLM did not load the plugin smg_grpc_servicer (does VLLM_PLUGINS "
            "name others?)"
        )

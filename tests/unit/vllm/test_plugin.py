from __future__ import annotations

import importlib.metadata
import multiprocessing
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from tests.unit.vllm.conftest import config

from smg_grpc_servicer.settings import VllmSettings
from smg_grpc_servicer.vllm import launcher, plugin
from smg_grpc_servicer.vllm.plugin import kv_events_config, turn_kv_events_on

ROOT = Path(__file__).parents[3]


@pytest.fixture
def async_llm(monkeypatch: pytest.MonkeyPatch) -> type[Any]:
    """A stand-in for vLLM: its AsyncLLM, which keeps what it was built with."""

    class AsyncLLM:
        def __init__(self, **named: Any) -> None:
            self.named = named

        @classmethod
        def from_vllm_config(cls, vllm_config: Any, **named: Any) -> AsyncLLM:
            return cls(vllm_config=vllm_config, **named)

    module: Any = ModuleType("vllm.v1.engine.async_llm")
    module.AsyncLLM = AsyncLLM
    loggers: Any = ModuleType("vllm.v1.metrics.loggers")
    loggers.StatLoggerBase = object
    configs: Any = ModuleType("vllm.config")
    configs.KVEventsConfig = SimpleNamespace
    for name in ("vllm", "vllm.v1", "vllm.v1.engine", "vllm.v1.metrics"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    for found in (module, loggers, configs):
        monkeypatch.setitem(sys.modules, found.__name__, found)
    return AsyncLLM


@pytest.fixture
def launching(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """vLLM's launcher, on a free port, as our caller."""
    flags = SimpleNamespace(host="127.0.0.1", port=0)
    monkeypatch.setattr(launcher, "arguments", lambda: flags)
    monkeypatch.setattr(sys, "argv", ["vllm", "serve", "m", "--grpc"])
    return flags


@pytest.mark.parametrize(
    "argv",
    [
        ["program.py"],
        ["vllm", "bench", "serve"],
        ["vllm", "chat"],
        ["-c"],
        ["pytest", "-k", "serve"],
    ],
)
def test_vllm_is_left_alone_in_other_programs(
    async_llm: type[Any], monkeypatch: pytest.MonkeyPatch, argv: list[str]
) -> None:
    monkeypatch.setattr(sys, "argv", argv)
    before = vars(async_llm).copy()
    plugin.register()
    assert vars(async_llm) == before


def test_vllm_is_left_alone_in_its_child_processes(
    async_llm: type[Any], monkeypatch: pytest.MonkeyPatch, launching: SimpleNamespace
) -> None:
    del launching
    monkeypatch.setattr(multiprocessing, "parent_process", object)
    before = vars(async_llm).copy()
    plugin.register()
    assert vars(async_llm) == before


def test_an_http_server_builds_what_it_built_before(
    async_llm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["vllm", "serve", "m"])
    plugin.register()
    given = config()
    built = async_llm.from_vllm_config(vllm_config=given, disable_log_stats=True)
    assert built.named == {"vllm_config": given, "disable_log_stats": True}
    assert given.kv_events_config is None


def test_the_grpc_launcher_gets_events_and_statistics(
    async_llm: Any, launching: SimpleNamespace
) -> None:
    del launching
    plugin.register()
    plugin.register()
    given = config()
    built = async_llm.from_vllm_config(vllm_config=given, disable_log_stats=True)
    assert given.kv_events_config.endpoint.startswith("ipc://")
    # A logger of somebody else's is what makes vLLM count although it logs nothing.
    (silent,) = built.named["stat_loggers"]
    silent(given, 0).record(None, None)
    quiet = async_llm.from_vllm_config(vllm_config=config(), disable_log_stats=False)
    assert "stat_loggers" not in quiet.named


def test_the_grpc_launcher_is_refused_before_its_engine_is_built(
    async_llm: Any, launching: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    plugin.register()
    launching.ssl_certfile = "c.pem"
    with pytest.raises(SystemExit):
        async_llm.from_vllm_config(vllm_config=config())
    assert "--ssl-certfile" in capsys.readouterr().err


def test_events_go_to_sockets_that_only_this_user_can_reach(async_llm: Any) -> None:
    del async_llm
    given = config()
    turn_kv_events_on(given, VllmSettings())
    found = kv_events_config(given)
    assert found is not None
    assert found.replay_endpoint is not None
    paths = [Path(at.removeprefix("ipc://")) for at in (found.endpoint, found.replay_endpoint)]
    (directory,) = {path.parent for path in paths}
    assert directory.stat().st_mode & 0o077 == 0
    # What vLLM looks for to give each rank an address of its own; and a socket's path is short.
    assert all("inproc" in str(path) and len(str(path)) < 100 for path in paths)
    plugin.remove_directories()
    assert not directory.exists()


@pytest.mark.parametrize("why", ["operator", "variable", "no prefix cache", "other hosts", "ray"])
def test_events_stay_as_they_are(async_llm: Any, monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    del async_llm
    given = config()
    if why == "operator":
        given.kv_events_config = SimpleNamespace(enable_kv_cache_events=False, publisher="null")
    elif why == "variable":
        monkeypatch.setenv("SMG_VLLM_SERVICER_KV_EVENTS", "0")
    elif why == "no prefix cache":
        given.cache_config.enable_prefix_caching = False
    elif why == "other hosts":
        given.parallel_config.data_parallel_size = 2
    else:
        given.parallel_config.data_parallel_backend = "ray"
    before = given.kv_events_config
    turn_kv_events_on(given, VllmSettings())
    assert given.kv_events_config is before
    assert kv_events_config(given) is None


def test_the_entry_point_names_the_plugin() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    line = next(line for line in text.splitlines() if ":register" in line)
    name, _, value = line.partition(" = ")
    point = importlib.metadata.EntryPoint(name, value.strip('"'), "vllm.general_plugins")
    assert point.load() is plugin.register

"""What an import may not bring with it."""

from __future__ import annotations

import json
import subprocess
import sys

HEAVY = {"mlx", "mlx_lm", "numpy", "sglang", "tokenspeed", "torch", "transformers", "vllm"}


def loaded_by(*modules: str) -> set[str]:
    """Return the top-level modules in a fresh interpreter after importing these."""
    code = (
        f"import json, sys; sys.path = {sys.path!r}; [__import__(name) for name in {modules!r}]; "
        "print(json.dumps([name for name in sys.modules if '.' not in name]))"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout
    return set(json.loads(output))


def test_importing_the_packages_imports_no_engine() -> None:
    packages = loaded_by(
        "smg_wire", "smg_grpc_servicer", "smg_grpc_servicer.mlx", "smg_grpc_servicer.vllm"
    )
    assert not packages & HEAVY
    # Nor what only a running worker needs.
    assert "grpc" not in packages


def test_the_program_of_a_worker_reads_its_flags_before_it_imports_the_engine() -> None:
    program = loaded_by("smg_grpc_servicer.mlx.server", "smg_grpc_servicer.serving.lifecycle")
    assert not program & HEAVY


def test_the_commands_import_no_engine() -> None:
    commands = loaded_by("smg_grpc_servicer.ask", "smg_grpc_servicer.doctor")
    assert not commands & HEAVY


def test_vllm_is_not_imported_with_the_worker_that_drives_it() -> None:
    worker = loaded_by("smg_grpc_servicer.vllm.servicer", "smg_grpc_servicer.vllm.health_servicer")
    assert not worker & HEAVY


def test_the_plugin_costs_other_vllm_processes_next_to_nothing() -> None:
    plugin = loaded_by("smg_grpc_servicer.vllm.plugin")
    assert not plugin & (HEAVY | {"pydantic", "prometheus_client", "opentelemetry"})


def test_kv_events_and_loads_import_neither_an_engine_nor_what_only_an_engine_brings() -> None:
    modules = loaded_by("smg_grpc_servicer.kv_events", "smg_grpc_servicer.vllm.telemetry")
    modules |= loaded_by("smg_grpc_servicer.vllm.events", "smg_grpc_servicer.vllm.loads")
    assert not modules & HEAVY
    # Installed with an engine, and not with us.
    assert not modules & {"msgspec", "zmq"}

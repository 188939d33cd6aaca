from __future__ import annotations

import shutil
import subprocess
from typing import Any

import pytest

import openblas
import prerequisites
from prerequisites import Missing

COMPILER = Missing("g++", "reason", required=True, package="g++")
LIBRARY = Missing("OpenBLAS", "reason", required=False, package="libopenblas0-pthread")


@pytest.fixture
def apt(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """A machine with apt-get, which records what it is asked for."""
    commands: list[list[str]] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[bytes]:
        commands.append(command)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    return commands


def run_with(
    monkeypatch: pytest.MonkeyPatch, *arguments: str, root: bool, found: list[list[Missing]]
) -> int:
    answers = iter(found)
    monkeypatch.setattr(prerequisites, "find_missing", lambda _redis: next(answers))
    monkeypatch.setattr(prerequisites, "_is_root", lambda: root)
    monkeypatch.setattr("sys.argv", ["prerequisites.py", *arguments])
    return prerequisites.main()


def test_nothing_missing_says_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_with(monkeypatch, "--install", root=True, found=[[]]) == 0
    assert capsys.readouterr() == ("", "")


def test_a_user_is_told_the_commands(
    monkeypatch: pytest.MonkeyPatch, apt: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    code = run_with(monkeypatch, "--install", root=False, found=[[COMPILER, LIBRARY]])

    assert code == 1
    assert apt == []
    assert capsys.readouterr().err.splitlines() == [
        "not root, so nothing is installed: run the commands below",
        "missing: g++ - reason: sudo apt-get install -y g++",
        (
            "missing, and can be done without: OpenBLAS - reason: "
            "sudo apt-get install -y libopenblas0-pthread"
        ),
    ]


def test_root_installs_and_checks_again(
    monkeypatch: pytest.MonkeyPatch, apt: list[list[str]]
) -> None:
    code = run_with(monkeypatch, "--install", root=True, found=[[COMPILER, LIBRARY], []])

    assert code == 0
    assert [command[-1] for command in apt] == ["update", "g++", "libopenblas0-pthread"]


def test_nothing_is_installed_unasked(
    monkeypatch: pytest.MonkeyPatch, apt: list[list[str]]
) -> None:
    assert run_with(monkeypatch, root=True, found=[[COMPILER]]) == 1
    assert apt == []


def test_what_can_be_done_without_fails_nothing(
    monkeypatch: pytest.MonkeyPatch, apt: list[list[str]]
) -> None:
    assert run_with(monkeypatch, root=False, found=[[LIBRARY]]) == 0


def test_a_machine_without_apt_gets_the_package_name(
    monkeypatch: pytest.MonkeyPatch, apt: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)

    run_with(monkeypatch, "--install", root=True, found=[[COMPILER]])

    assert "package manager (Debian: g++)" in capsys.readouterr().err


def test_redis_is_looked_for_only_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prerequisites, "_runs", lambda *command: command[0] != "redis-server")

    assert "redis-server" not in [missing.name for missing in prerequisites.find_missing()]
    assert "redis-server" in [missing.name for missing in prerequisites.find_missing(redis=True)]


def test_the_preload_names_the_library_before_what_was_preloaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(openblas, "find_openblas", lambda: "/lib/libopenblas.so.0")

    monkeypatch.delenv("LD_PRELOAD", raising=False)
    assert openblas.preload_environment() == {"LD_PRELOAD": "/lib/libopenblas.so.0"}

    monkeypatch.setenv("LD_PRELOAD", "/lib/libjemalloc.so")
    assert openblas.preload_environment()["LD_PRELOAD"] == (
        "/lib/libopenblas.so.0:/lib/libjemalloc.so"
    )


def test_no_library_means_nothing_to_preload(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openblas, "find_openblas", lambda: None)

    assert openblas.preload_environment() == {}


def test_ldconfig_is_read_for_this_machine_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    listing = (
        "\tlibopenblas.so.0 (libc6) => /lib/i386-linux-gnu/libopenblas.so.0\n"
        "\tlibopenblasp.so.0 (libc6,x86-64) => /lib64/libopenblasp.so.0\n"
    )
    result = subprocess.CompletedProcess([], 0, stdout=listing)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: result)

    assert openblas._from_ldconfig("x86_64") == "/lib64/libopenblasp.so.0"
    assert openblas._from_ldconfig("aarch64") is None

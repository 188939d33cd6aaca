"""doctor: one line a check, and an exit code that says whether anything will fail."""

from __future__ import annotations

import importlib.metadata

import pytest

from smg_grpc_servicer import doctor
from smg_grpc_servicer.serving import proto_check
from smg_wire.errors import SettingsError


def lines(level: str) -> list[str]:
    return [finding.text for finding in doctor.examine() if finding.level == level]


def test_it_names_the_interpreter_and_the_versions(capsys: pytest.CaptureFixture[str]) -> None:
    doctor.main([])
    printed = capsys.readouterr().out
    assert f"grpcio {importlib.metadata.version('grpcio')}" in printed
    assert "smg-grpc-proto knows every field" in printed


def test_a_proto_that_lacks_a_field_fails_and_says_how_to_mend_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    newest = {"mlx": ("mlx_engine_pb2", "GenerateComplete", "not_yet_there")}
    monkeypatch.setattr(proto_check, "NEWEST_FIELDS", newest)
    (line,) = [text for text in lines(doctor.FAIL) if "not_yet_there" in text]
    assert "GenerateComplete.not_yet_there" in line
    assert "pip install --upgrade smg-grpc-proto" in line
    assert doctor.main([]) == 1


def test_a_proto_without_the_engine_fails_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    newest = {"mlx": ("no_such_engine_pb2", "GenerateComplete", "output_ids")}
    monkeypatch.setattr(proto_check, "NEWEST_FIELDS", newest)
    problem = proto_check.problem("mlx")
    assert problem is not None
    assert "\n" not in problem
    assert "pip install --upgrade smg-grpc-proto" in problem


def test_two_owners_of_one_package_fail_with_the_way_to_mend_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    owners = {"smg_grpc_servicer": ["tokenspeed-smg-grpc-servicer", "smg-grpc-servicer"]}
    monkeypatch.setattr(importlib.metadata, "packages_distributions", lambda: owners)
    (line,) = [text for text in lines(doctor.FAIL) if "owned by" in text]
    assert "pip uninstall -y tokenspeed-smg-grpc-servicer" in line
    assert "--force-reinstall --no-deps smg-grpc-servicer" in line


def test_it_takes_no_arguments() -> None:
    with pytest.raises(SettingsError, match="no arguments"):
        doctor.main(["--loud"])

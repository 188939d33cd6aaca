from __future__ import annotations

import zipfile
from typing import TYPE_CHECKING

import check_wheel

if TYPE_CHECKING:
    from pathlib import Path

INFO = "smg_grpc_servicer-1.0.dist-info"
METADATA = "Metadata-Version: 2.4\nName: smg-grpc-servicer\nVersion: 1.0\n\nWhat it is.\n"


def write(directory: Path, members: list[str], metadata: str = METADATA) -> Path:
    wheel = directory / "smg_grpc_servicer-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for member in members:
            archive.writestr(member, metadata if member.endswith("METADATA") else "")
    return wheel


def whole() -> list[str]:
    return [pattern.format(info=INFO) for pattern in check_wheel.NEEDED]


def test_a_whole_wheel_has_no_complaint(tmp_path: Path) -> None:
    assert check_wheel.complaints(write(tmp_path, whole())) == []


def test_a_missing_licence_and_a_stray_package_are_named(tmp_path: Path) -> None:
    members = [member for member in whole() if not member.endswith("LICENSE")]

    found = check_wheel.complaints(write(tmp_path, [*members, "tests/test_it.py"]))

    assert found == [f"{INFO}/licenses/LICENSE is missing", "tests does not belong in it"]


def test_metadata_must_agree_with_the_file_name(tmp_path: Path) -> None:
    metadata = METADATA.replace("Version: 1.0", "Version: 2.0").replace("What it is.\n", "")

    found = check_wheel.complaints(write(tmp_path, whole(), metadata))

    assert found == [
        "METADATA names smg-grpc-servicer 2.0",
        "METADATA has no description",
    ]

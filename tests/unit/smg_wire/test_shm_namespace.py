from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from smg_wire import shm_namespace

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    shm_namespace.shm_namespace_id.cache_clear()
    yield
    shm_namespace.shm_namespace_id.cache_clear()


def test_it_is_the_boot_and_the_device_of_dev_shm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    boot_id = tmp_path / "boot_id"
    boot_id.write_text("0000-1111\n")
    monkeypatch.setattr(shm_namespace, "_BOOT_ID", boot_id)
    monkeypatch.setattr(shm_namespace, "_DEV_SHM", tmp_path)
    assert shm_namespace.shm_namespace_id() == f"0000-1111:{tmp_path.stat().st_dev}"


@pytest.mark.parametrize("missing", ["_BOOT_ID", "_DEV_SHM"])
def test_it_is_empty_where_it_cannot_be_known(
    missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    boot_id = tmp_path / "boot_id"
    boot_id.write_text("0000-1111\n")
    monkeypatch.setattr(shm_namespace, "_BOOT_ID", boot_id)
    monkeypatch.setattr(shm_namespace, "_DEV_SHM", tmp_path)
    monkeypatch.setattr(shm_namespace, missing, tmp_path / "absent")
    assert shm_namespace.shm_namespace_id() == ""


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no /dev/shm here")
def test_this_machine_has_one() -> None:
    assert re.fullmatch(r"[0-9a-f-]{36}:\d+", shm_namespace.shm_namespace_id())

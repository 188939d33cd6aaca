"""The identity of this process's /dev/shm: two processes with the same one share its files."""

from __future__ import annotations

import functools
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_DEV_SHM = Path("/dev/shm")


@functools.cache
def shm_namespace_id() -> str:
    """Return `<boot id>:<device number of /dev/shm>`, or an empty string when either is unknown.

    The boot id tells hosts apart, the device number the tmpfs of containers on one host.
    """
    try:
        boot_id = _BOOT_ID.read_text(encoding="ascii").strip()
        device = _DEV_SHM.stat().st_dev
    except OSError:
        return ""
    return f"{boot_id}:{device}" if boot_id and _DEV_SHM.is_dir() else ""

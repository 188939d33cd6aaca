"""The one directory under the user's cache where the demo model and its wheel are kept."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def cache_directory() -> Path:
    """Return `smg-grpc-servicer` in the user's cache directory; it need not exist yet."""
    configured = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification has relative paths ignored.
    if configured and Path(configured).is_absolute():
        base = Path(configured)
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = Path.home() / ".cache"
    return base / "smg-grpc-servicer"

"""The MLX worker with an engine that a signal kills.

SIGUSR1: its next step raises. SIGUSR2: its next step never ends.
"""

from __future__ import annotations

import functools
import signal
import sys
import threading
from typing import TYPE_CHECKING, Any

from smg_grpc_servicer.mlx import generator, worker
from smg_grpc_servicer.mlx.server import main
from smg_grpc_servicer.serving.lifecycle import leave

if TYPE_CHECKING:
    from smg_grpc_servicer.mlx.config import EngineConfig

_broken = threading.Event()
_stuck = threading.Event()


class _Breakable:
    """A batch generator that works until it is told not to."""

    def __init__(self, model: Any, config: EngineConfig) -> None:
        self._inner = generator.make_generator(model, config)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def next(self) -> Any:
        if _broken.is_set():
            raise RuntimeError("this step was told to fail")
        if _stuck.is_set():
            threading.Event().wait()
        return self._inner.next()


if __name__ == "__main__":
    signal.signal(signal.SIGUSR1, lambda *_: _broken.set())
    signal.signal(signal.SIGUSR2, lambda *_: _stuck.set())
    # The worker makes its engine without a choice of generator, as it should.
    worker.MlxEngine = functools.partial(worker.MlxEngine, make_generator=_Breakable)  # type: ignore[misc, assignment]
    leave(main(sys.argv[1:]))

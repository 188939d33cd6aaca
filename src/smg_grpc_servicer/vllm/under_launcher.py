"""The ends of a worker whose process vLLM's launcher runs: by a signal, or with its engine."""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import threading
import time
from typing import TYPE_CHECKING

from smg_grpc_servicer.serving.health import State
from smg_grpc_servicer.serving.lifecycle import EXIT_ENGINE_DEAD, EXIT_OK, leave
from smg_grpc_servicer.vllm import engine, launcher, plugin
from smg_wire.errors import Unavailable

if TYPE_CHECKING:
    from smg_grpc_servicer.vllm.worker import VllmWorker

_logger = logging.getLogger(__name__)

# vLLM's launcher gives running RPCs five seconds and then cancels them; a little before that
# they get a status that says why.
_LAUNCHER_GRACE_SECONDS = 5.0
_CUT_SECONDS = 4.5
# What the launcher needs to return once it has stopped the engine.
_LAUNCHER_END_SECONDS = 0.5
# What the process may take to end after that, on its way through vLLM's and Python's exits.
_EXIT_SECONDS = 8.0
_POLL_SECONDS = 0.1
# What streams get to write their last status after the engine's death, and what is left of the
# engine to end.
_FLUSH_SECONDS = 1.0
_CLOSE_SECONDS = 2.0


async def end_with_the_engine(worker: VllmWorker) -> None:
    """Wait for the engine's death, then fail all requests and end the process with 1.

    The launcher waits for a signal alone: without this it would serve errors for ever.
    """
    reason = await worker.died()
    if worker.health.state is State.DRAINING:
        worker.generations.fail_all(reason)
        # Stopping the engine is the last that the launcher does: the loop ends, and this with it.
        await asyncio.sleep(_LAUNCHER_END_SECONDS)
    _logger.error("engine is dead: %s; exiting with code %d", reason.message, EXIT_ENGINE_DEAD)
    worker.health.to(State.DEAD)
    worker.generations.fail_all(reason)
    try:
        await asyncio.wait_for(worker.generations.drained(), _FLUSH_SECONDS)
        # The last status and the news to health watchers are written, not yet sent.
        await asyncio.sleep(0.1)
    except asyncio.TimeoutError:
        _logger.warning("%d streams did not end", worker.generations.in_flight)
    closing = asyncio.get_running_loop().run_in_executor(
        None, engine.shut_down, worker.engine_client
    )
    await asyncio.wait([closing], timeout=_CLOSE_SECONDS)
    engine.kill_children()
    plugin.remove_directories()
    leave(EXIT_ENGINE_DEAD)


def drain(worker: VllmWorker) -> None:
    """Refuse what is new, and end what still runs just before the launcher would cut it."""
    worker.health.to(State.DRAINING)
    wanted = worker.settings.drain_timeout
    allowed = min(wanted, _CUT_SECONDS)
    if wanted > _LAUNCHER_GRACE_SECONDS and "drain_timeout" in worker.settings.model_fields_set:
        _logger.warning(
            "vLLM's launcher allows a drain of %g s, not %g: %s allows any",
            _LAUNCHER_GRACE_SECONDS,
            wanted,
            launcher.OURS,
        )
    _logger.info("draining %d requests for up to %g s", worker.generations.in_flight, allowed)
    worker.run(_cut_after(worker, allowed))
    _bound_the_exit(worker)


def _bound_the_exit(worker: VllmWorker) -> None:
    threading.Thread(
        target=_leave_if_stuck, args=(worker,), name="bound-the-exit", daemon=True
    ).start()


def _leave_if_stuck(worker: VllmWorker) -> None:
    """Wait until the launcher has stopped the engine, and end a process that lives on after it.

    Between the launcher's last line and the end stand the exits of vLLM's threads, of ZeroMQ and
    of gRPC; one that waits for ever would leave a stopped worker to its supervisor's SIGKILL.
    """
    while not worker.engine_client.errored:
        time.sleep(_POLL_SECONDS)
    time.sleep(_EXIT_SECONDS)
    _logger.warning("the process did not end %g s after its engine; it stood at:", _EXIT_SECONDS)
    faulthandler.dump_traceback(all_threads=True)
    engine.kill_children()
    plugin.remove_directories()
    leave(EXIT_OK)


async def _cut_after(worker: VllmWorker, seconds: float) -> None:
    await asyncio.sleep(seconds)
    if worker.generations.in_flight:
        _logger.warning("drain timeout is over: ending %d requests", worker.generations.in_flight)
        worker.generations.cut_all(Unavailable("the worker shut down before the request ended"))

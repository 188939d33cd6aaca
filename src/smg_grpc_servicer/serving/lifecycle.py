"""A worker's life as a process: start, serve, drain or die, and the exit code.

====  =================================================================
code  meaning
====  =================================================================
0     stopped by SIGTERM or SIGINT; running requests ended or were
      given UNAVAILABLE when the drain timeout was over
1     the engine died or stalled while the worker was up
2     a flag or a variable holds a value that it may not hold
3     the worker could not start: port, TLS file, model, missing package
130   a second SIGINT forced the end (143: a second SIGTERM)
====  =================================================================
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import logging
import os
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from smg_grpc_servicer.serving.health import STATE_LABELS, Health, State
from smg_grpc_servicer.serving.server import bind, build_server, start_metrics
from smg_wire.errors import EngineDead, SettingsError, SmgError, StartError, Unavailable
from smg_wire.observability import WorkerMetrics, configure_logging, configure_tracing
from smg_wire.settings import load

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Sequence

    import grpc

    from smg_grpc_servicer.serving.generation import Generations
    from smg_grpc_servicer.settings import ServingSettings

_logger = logging.getLogger(__name__)

EXIT_OK = 0
EXIT_ENGINE_DEAD = 1
EXIT_SETTINGS = 2
EXIT_START = 3

# What streams get to write their last status once their requests have ended, and then the last
# spans to reach their collector.
_FLUSH_SECONDS = 2.0
# What an engine gets to free what it holds; after that the process ends anyway.
_CLOSE_SECONDS = 10.0


class Worker(Protocol):
    """What an engine package brings to the serving core."""

    services: Sequence[str]

    @property
    def generations(self) -> Generations:
        """The live requests; asked for once the worker has started."""

    def register(self, server: grpc.aio.Server) -> None:
        """Add the engine's servicers to the server."""

    async def start(self) -> None:
        """Load and warm the engine; move health to WARMING in between. May be cancelled.

        Raises:
            StartError: it cannot be started.
        """

    async def died(self) -> EngineDead:
        """Wait for the engine's death and return its reason."""

    async def close(self) -> None:
        """Stop the engine; what it holds is freed."""


SettingsT = TypeVar("SettingsT", bound="ServingSettings")
Factory = "Callable[[SettingsT, Health, WorkerMetrics], Worker]"


def run(
    settings_class: type[SettingsT],
    factory: Callable[[SettingsT, Health, WorkerMetrics], Worker],
    *,
    engine: str,
    argv: Sequence[str],
) -> int:
    """Run a worker's whole life; return the exit code. Prints one line for what stops a start."""
    _open_closed_streams()
    try:
        settings = load(settings_class, argv, prog=f"python -m smg_grpc_servicer.{engine}")
    except SettingsError as error:
        print(f"error: {error.message}", file=sys.stderr)
        return EXIT_SETTINGS
    configure_logging(settings.log_level, settings.log_format)
    try:
        flush_spans = configure_tracing(settings.otlp_traces_endpoint, service=f"smg-{engine}")
        try:
            return _run_loop(_serve(settings, factory, engine))
        finally:
            _flush(flush_spans)
    except StartError as error:
        print(f"error: {error.message}", file=sys.stderr)
        return EXIT_START


def _open_closed_streams() -> None:
    """Put the null device where a supervisor closed standard input, output or error.

    Else the next socket gets the number, and with it what is meant for the stream; the event
    loop's library aborts the process when it has to close one with such a number.
    """
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        try:
            os.fstat(number)
        except OSError:
            # The lowest free number is given out: this one, as those below it are open by now.
            # Programs that the engine runs, such as a compiler, inherit it.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115


def _flush(flush_spans: Callable[[], None]) -> None:
    """Send the last spans; a collector that is away does not hold the exit."""
    flushing = threading.Thread(target=flush_spans, name="flush-spans", daemon=True)
    flushing.start()
    flushing.join(_FLUSH_SECONDS)


def leave(code: int) -> None:
    """End the process now.

    An engine's thread may be stuck inside native code, where no interpreter shutdown reaches it:
    after a clean close there is nothing left that an orderly exit would still have to free.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


class _Executor(ThreadPoolExecutor):
    """A default executor that the loop does not wait for when it closes.

    A thread that loads a model cannot be stopped; asyncio would wait for it after SIGTERM.
    """

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Drop what waits, and leave what runs to the end of the process."""
        del wait, cancel_futures
        super().shutdown(wait=False, cancel_futures=True)


def _run_loop(main: Awaitable[int]) -> int:
    async def awaited() -> int:
        asyncio.get_running_loop().set_default_executor(_Executor())
        return await main

    faulthandler.enable()
    try:
        import uvloop
    except ImportError:
        return asyncio.run(awaited())
    return uvloop.run(awaited())


async def _serve(
    settings: SettingsT,
    factory: Callable[[SettingsT, Health, WorkerMetrics], Worker],
    engine: str,
) -> int:
    health, metrics = Health(), WorkerMetrics(engine)
    health.subscribe(lambda state: metrics.set_state(state.label, STATE_LABELS))
    with _signals() as stop, contextlib.ExitStack() as owned:
        worker = factory(settings, health, metrics)
        server = build_server(
            settings,
            health=health,
            metrics=metrics,
            services=worker.services,
            register=worker.register,
        )
        port = bind(server, settings)
        owned.callback(start_metrics(settings, metrics))
        await server.start()
        try:
            if not await _until(stop, _start(worker)):
                return EXIT_OK
            health.to(State.SERVING)
            _logger.info("gRPC server listening on %s:%d", settings.host, port)
            died = asyncio.ensure_future(worker.died())
            if await _until(stop, asyncio.shield(died)):
                _die(health, worker, died.result())
                return EXIT_ENGINE_DEAD
            code = await _drain(health, worker, died, settings.drain_timeout)
            died.cancel()
            return code
        finally:
            health.to(State.DRAINING)
            await server.stop(_FLUSH_SECONDS)
            await _close(worker)


async def _start(worker: Worker) -> None:
    try:
        await worker.start()
    except StartError:
        raise
    except SmgError as error:
        raise StartError(error.message) from error
    except Exception as error:
        _logger.exception("the engine failed to start")
        raise StartError(f"the engine failed to start: {type(error).__name__}: {error}") from error


async def _until(stop: asyncio.Event, work: Awaitable[Any]) -> bool:
    """Await `work` and return True, or cancel it and return False when asked to stop first."""
    task: asyncio.Future[Any] = asyncio.ensure_future(work)
    asked: asyncio.Future[Any] = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait([task, asked], return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
            return True
        return False
    finally:
        for pending in (task, asked):
            pending.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asked
        if not task.done():
            try:
                await task
            except asyncio.CancelledError:
                pass
            except SmgError as error:
                _logger.info("stopped while ending: %s", error.message)


def _die(health: Health, worker: Worker, reason: EngineDead) -> None:
    _logger.error("engine is dead: %s; exiting with code %d", reason.message, EXIT_ENGINE_DEAD)
    health.to(State.DEAD)
    worker.generations.fail_all(reason)


async def _drain(
    health: Health, worker: Worker, died: asyncio.Future[EngineDead], timeout: float
) -> int:
    """Refuse what is new, let what runs end, then cut what is left."""
    health.to(State.DRAINING)
    generations = worker.generations
    _logger.info("draining %d requests for up to %g s", generations.in_flight, timeout)
    drained = asyncio.ensure_future(generations.drained())
    ends: list[asyncio.Future[Any]] = [drained, died]
    await asyncio.wait(ends, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
    drained.cancel()
    if died.done():
        _die(health, worker, died.result())
        return EXIT_ENGINE_DEAD
    if generations.in_flight:
        _logger.warning("drain timeout is over: ending %d requests", generations.in_flight)
        generations.cut_all(Unavailable("the worker shut down before the request ended"))
    return EXIT_OK


async def _close(worker: Worker) -> None:
    closing = asyncio.ensure_future(worker.close())
    await asyncio.wait([closing], timeout=_CLOSE_SECONDS)
    if not closing.done():
        _logger.warning("the engine did not stop within %g s", _CLOSE_SECONDS)
        closing.cancel()
    elif closing.exception() is not None:
        _logger.warning("the engine did not stop cleanly", exc_info=closing.exception())


@contextlib.contextmanager
def _signals() -> Iterator[asyncio.Event]:
    """Set the event on the first SIGTERM or SIGINT; the second ends the process at once."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()

    def handle(number: int) -> None:
        if stop.is_set():
            _logger.warning("second signal: exiting now")
            leave(128 + number)
        _logger.info("received %s", signal.Signals(number).name)
        stop.set()

    numbers = (signal.SIGTERM, signal.SIGINT)
    for number in numbers:
        loop.add_signal_handler(number, handle, number)
    try:
        yield stop
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)

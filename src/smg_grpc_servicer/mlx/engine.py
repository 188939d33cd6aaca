"""The MLX engine as the event loop sees it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from smg_grpc_servicer.mlx import generator as generators
from smg_grpc_servicer.mlx.alignment import probe_alignment
from smg_grpc_servicer.mlx.batcher import Batcher
from smg_grpc_servicer.mlx.loop import Engine, StepLoop
from smg_grpc_servicer.mlx.model import LoadedModel, load_model
from smg_grpc_servicer.mlx.prefix_cache import PrefixCache
from smg_grpc_servicer.mlx.warm_up import warm_up
from smg_wire.errors import EngineDead, SmgError, StartError, Unavailable

if TYPE_CHECKING:
    from collections.abc import Callable

    from smg_grpc_servicer.mlx.batcher import Result
    from smg_grpc_servicer.mlx.config import EngineConfig, MlxRequest
    from smg_grpc_servicer.serving.deltas import Sink

logger = logging.getLogger(__name__)

_WATCH_INTERVAL_S = 1.0
_CLOSE_TIMEOUT_S = 10.0
_CLOSE_POLL_S = 0.01


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Figures for metrics, of this moment.

    Args:
        running: requests in the batch.
        waiting: requests that have no place in the batch yet.
        steps: steps since the start.
        prefix_cache_entries: token sequences kept for reuse.
        prefix_cache_bytes: memory that they hold.
    """

    running: int = 0
    waiting: int = 0
    steps: int = 0
    prefix_cache_entries: int = 0
    prefix_cache_bytes: int = 0


class MlxEngine:
    """Generates for any number of requests in one batch, on a thread of its own.

    All methods are for the event loop's thread. Tokens leave the stepping thread in one call
    a step, and are pushed into the sinks here.

    Args:
        config: the model and the sizes.
        make_generator: builds the batch generator from the network and the config, on the
            stepping thread.
    """

    def __init__(
        self,
        config: EngineConfig,
        make_generator: Callable[[Any, EngineConfig], Any] = generators.make_generator,
    ) -> None:
        self._config = config
        self._make_generator = make_generator
        self._sinks: dict[str, Sink] = {}
        self._engine: Engine | None = None
        self._loop: StepLoop | None = None
        self._ready: asyncio.Future[LoadedModel] | None = None
        self._dead: asyncio.Future[EngineDead] | None = None
        self._watchdog: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def dead(self) -> asyncio.Future[EngineDead]:
        """Resolves with the reason if the engine dies; never if it is closed in order."""
        if self._dead is None:
            raise RuntimeError("the engine has not been started")
        return self._dead

    @property
    def stats(self) -> EngineStats:
        """Figures for metrics."""
        if self._engine is None or self._loop is None:
            return EngineStats()
        # Requests that the thread has not seen yet are in no count of the thread's.
        running = self._engine.batcher.running
        return EngineStats(
            running=running,
            waiting=max(self._engine.batcher.waiting, len(self._sinks) - running),
            steps=self._loop.steps,
            prefix_cache_entries=len(self._engine.prefix_cache),
            prefix_cache_bytes=self._engine.prefix_cache.nbytes,
        )

    @property
    def running(self) -> int:
        """Requests in the batch."""
        return self.stats.running

    @property
    def waiting(self) -> int:
        """Requests that have no place in the batch yet."""
        return self.stats.waiting

    async def start(self, on_loaded: Callable[[], None] = lambda: None) -> LoadedModel:
        """Load the model and warm it up; return it with the facts about it.

        `on_loaded` is called in between, on the event loop's thread. May be cancelled: the
        thread then ends at its next chance, and is not waited for.

        Raises:
            StartError: the model cannot be loaded or does not run.
        """
        loop = asyncio.get_running_loop()
        self._dead = loop.create_future()
        self._ready = loop.create_future()

        def build(should_stop: Callable[[], bool]) -> Engine | None:
            return self._build(should_stop, lambda: loop.call_soon_threadsafe(on_loaded))

        self._loop = StepLoop(
            build, loop.call_soon_threadsafe, self, coalesce_s=self._config.coalesce_s
        )
        self._loop.start()
        try:
            loaded = await self._ready
        except asyncio.CancelledError:
            self._closed = True
            self._loop.stop()
            raise
        self._watchdog = loop.create_task(self._watch(self._loop), name="mlx-watchdog")
        return loaded

    def _build(
        self, should_stop: Callable[[], bool], tell_loaded: Callable[[], object]
    ) -> Engine | None:
        """Build everything, on the stepping thread."""
        config = self._config
        loaded = load_model(config.model, config.adapter_path, config.served_name)
        if should_stop():
            return None
        tell_loaded()
        prefix_cache = PrefixCache(config.prefix_cache_bytes, generators.settle)
        generator = self._make_generator(loaded.model, config)

        def close() -> None:
            prefix_cache.clear()
            generators.close_generator(generator)

        try:
            batcher = Batcher(
                generator,
                prefix_cache,
                config,
                generators.prefill_step_size(config),
                align=probe_alignment(),
                snapshots=generators.needs_snapshots(loaded.model),
            )
            warm_up(batcher, loaded.facts.vocab_size, should_stop)
        except BaseException:
            close()
            raise
        prefix_cache.clear()
        if should_stop():
            close()
            return None
        return Engine(loaded, batcher, prefix_cache, close)

    def submit(self, engine_id: str, request: MlxRequest, sink: Sink) -> None:
        """Queue a request, whose id no live one has; what it brings is pushed into the sink.

        Raises:
            EngineDead: the engine is dead.
            Unavailable: it is not started yet, or closed.
        """
        if self._dead is not None and self._dead.done():
            raise self._dead.result()
        if self._closed or self._loop is None or self._engine is None:
            raise Unavailable("the engine is not running")
        self._sinks[engine_id] = sink
        self._loop.submit(engine_id, request)

    def abort(self, engine_id: str) -> None:
        """End a request: its sink gets nothing more. An id that is not live is no error."""
        if self._sinks.pop(engine_id, None) is not None and self._loop is not None:
            self._loop.abort(engine_id)

    async def close(self) -> None:
        """Stop after the current step and wait for that, but not for ever.

        Requests that are still live fail as unavailable.
        """
        self._closed = True
        if self._watchdog is not None:
            self._watchdog.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watchdog
            self._watchdog = None
        if self._loop is None:
            return
        self._loop.stop()
        self._fail_all(Unavailable("the worker is shutting down"))
        # Asked for, not waited on: the thread's last words come before its end, and an
        # interpreter that exits between the two is aborted by the native code's clean-up.
        deadline = asyncio.get_running_loop().time() + _CLOSE_TIMEOUT_S
        while self._loop.alive:
            if asyncio.get_running_loop().time() > deadline:
                logger.warning("the stepping thread is still in a step; it is left behind")
                return
            await asyncio.sleep(_CLOSE_POLL_S)
        # The model's memory is free from here on.
        self._engine = self._ready = None

    @property
    def thread_alive(self) -> bool:
        """Whether the stepping thread runs.

        If it still does after `close`, or after `start` was cancelled, the process should end by
        `os._exit`: an orderly exit of the interpreter around native code aborts.
        """
        return self._loop is not None and self._loop.alive

    def on_ready(self, engine: Engine) -> None:
        """Take over what the thread has built."""
        self._engine = engine
        if self._ready is not None and not self._ready.done():
            self._ready.set_result(engine.loaded)

    def on_results(self, results: list[Result]) -> None:
        """Push the results of one step into the sinks of those who are still there."""
        for engine_id, result in results:
            sink = self._sinks.get(engine_id)
            if sink is None:
                continue
            if isinstance(result, SmgError):
                del self._sinks[engine_id]
                sink.fail(result)
                continue
            if result.finish is not None:
                del self._sinks[engine_id]
            sink.push(result)

    def on_end(self, error: BaseException | None) -> None:
        """Tell a wanted end of the thread from a death."""
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(_start_error(error))
        elif not self._closed:
            if error is not None:
                logger.error("the stepping thread died", exc_info=error)
            reason = "ended" if error is None else f"died: {type(error).__name__}"
            self._die(EngineDead(f"the MLX engine's thread {reason}"))

    def _die(self, reason: EngineDead) -> None:
        if self._dead is None or self._dead.done():
            return
        self._dead.set_result(reason)
        if self._loop is not None:
            self._loop.stop()
        self._fail_all(reason)

    def _fail_all(self, error: SmgError) -> None:
        sinks, self._sinks = self._sinks, {}
        for sink in sinks.values():
            sink.fail(error)

    async def _watch(self, loop: StepLoop) -> None:
        """Declare the engine dead if it owes a step and does not make it.

        Time is counted in ticks of this task, not by the clock: when the whole process was
        suspended, or this loop held up, the thread is not to blame.
        """
        interval = min(_WATCH_INTERVAL_S, self._config.stall_timeout_s / 4)
        clock = asyncio.get_running_loop().time
        seen, stalled, last = loop.steps, 0.0, clock()
        while not self.dead.done():
            await asyncio.sleep(interval)
            now = clock()
            tick, last = min(now - last, 2 * interval), now
            if not self._sinks or loop.steps != seen:
                seen, stalled = loop.steps, 0.0
                continue
            stalled += tick
            allowed = self._config.stall_timeout_s + loop.step_allowance_s
            if stalled > allowed:
                logger.error("no step in %.0f s with requests pending", stalled)
                self._die(EngineDead(f"the MLX engine made no step in {stalled:.0f} s"))
            elif not loop.alive:
                self._die(EngineDead("the MLX engine's thread is gone"))


def _start_error(error: BaseException | None) -> StartError:
    if isinstance(error, StartError):
        return error
    if error is None:
        return StartError("the MLX engine was stopped while it started")
    logger.error("the MLX engine failed to start", exc_info=error)
    text = " ".join(str(error).split())
    return StartError(f"the MLX engine failed to start: {type(error).__name__}: {text}")

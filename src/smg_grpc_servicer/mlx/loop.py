"""The one thread that owns the model: it loads it, warms it up and steps it."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from smg_grpc_servicer.mlx.batcher import Batcher, Result
    from smg_grpc_servicer.mlx.config import MlxRequest
    from smg_grpc_servicer.mlx.model import LoadedModel
    from smg_grpc_servicer.mlx.prefix_cache import PrefixCache

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Engine:
    """What the thread builds: the model, what it is stepped with, and how to end that."""

    loaded: LoadedModel
    batcher: Batcher
    prefix_cache: PrefixCache
    close: Callable[[], None]


class Listener(Protocol):
    """What the thread tells of itself. Called on the event loop's thread."""

    def on_ready(self, engine: Engine) -> None:
        """The model is loaded and warm."""

    def on_results(self, results: list[Result]) -> None:
        """All that one step had to say."""

    def on_end(self, error: BaseException | None) -> None:
        """The thread ended, by an error or because it was told to. Comes last, and once."""


class StepLoop:
    """Runs the stepping thread; its methods are for the event loop's thread and never wait.

    Args:
        build: builds the engine on the thread; it is given a function that says whether to
            give up, and then returns None.
        post: hands a call over to the event loop, e.g. its `call_soon_threadsafe`.
        listener: what to call there.
        coalesce_s: the longest that an idle thread waits for others to join a first request.
    """

    def __init__(
        self,
        build: Callable[[Callable[[], bool]], Engine | None],
        post: Callable[..., object],
        listener: Listener,
        coalesce_s: float = 0.0,
    ) -> None:
        self._build = build
        self._post = post
        self._listener = listener
        self._coalesce_s = coalesce_s
        self._work = threading.Condition()
        self._inbox: list[tuple[str, MlxRequest | None]] = []
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="mlx-step", daemon=True)
        self.steps = 0
        # Written by the thread before each step, read by whoever watches it.
        self.step_allowance_s = 0.0

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Have the thread end after its current step."""
        with self._work:
            self._stopping = True
            self._work.notify()

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def submit(self, engine_id: str, request: MlxRequest) -> None:
        """Queue a request for the next step."""
        self._put(engine_id, request)

    def abort(self, engine_id: str) -> None:
        """Have a request gone before the next step, if it is still there."""
        self._put(engine_id, None)

    def _put(self, engine_id: str, request: MlxRequest | None) -> None:
        with self._work:
            self._inbox.append((engine_id, request))
            self._work.notify()

    def _take(self, *, wait: bool) -> list[tuple[str, MlxRequest | None]] | None:
        """Return what came in, waiting for something if `wait`; None once stopping."""
        with self._work:
            while wait and not self._inbox and not self._stopping:
                self._work.wait()
            if wait:
                self._gather()
            if self._stopping:
                return None
            inbox, self._inbox = self._inbox, []
            return inbox

    def _gather(self) -> None:
        """Let requests that come together start together; called with the lock held.

        Prompts that are read in one step take little longer than one of them alone, and the
        rest of a burst would otherwise wait for the first one's whole prompt. A quarter of the
        longest wait without an arrival ends it, so that a lone request hardly waits.
        """
        deadline = time.monotonic() + self._coalesce_s
        while not self._stopping and (left := deadline - time.monotonic()) > 0:
            before = len(self._inbox)
            self._work.wait(min(left, self._coalesce_s / 4))
            if len(self._inbox) == before:
                return

    def _run(self) -> None:
        failure: BaseException | None = None
        try:
            self._load_and_serve()
        except BaseException as error:  # the thread's death is the engine's, whatever it is
            failure = error
        self._tell(self._listener.on_end, failure)

    def _load_and_serve(self) -> None:
        engine = self._build(lambda: self._stopping)
        if engine is None:
            return
        self._tell(self._listener.on_ready, engine)
        try:
            self._serve(engine.batcher)
        finally:
            engine.close()

    def _serve(self, batcher: Batcher) -> None:
        while True:
            inbox = self._take(wait=not batcher.busy)
            if inbox is None:
                return
            aborted = []
            for engine_id, request in inbox:
                if request is None:
                    aborted.append(engine_id)
                else:
                    batcher.add(engine_id, request)
            batcher.retire(aborted)
            if not batcher.busy:
                continue
            results = batcher.admit()
            # A long prompt may take minutes on a CPU, and that is no stall.
            self.step_allowance_s = 4 * batcher.coming_prefill_tokens * batcher.seconds_per_token
            results += batcher.step()
            self.steps += 1
            if results:
                self._tell(self._listener.on_results, results)

    def _tell(self, call: Callable[..., None], *args: Any) -> None:
        try:
            self._post(call, *args)
        except RuntimeError:
            # The event loop is closed: nobody is left to be told, and nothing to step for.
            logger.debug("the event loop is closed; the stepping thread ends")
            self._stopping = True

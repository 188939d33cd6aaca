"""The requests of one model in one continuous batch. All of it lives on the stepping thread."""

from __future__ import annotations

import logging
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from smg_grpc_servicer.mlx.alignment import RowFunctions
from smg_grpc_servicer.mlx.logprobs import token_logprobs
from smg_grpc_servicer.mlx.sampling import RawLogits, make_logits_processors, make_sampler
from smg_grpc_servicer.serving.deltas import LENGTH, STOP, Delta, Finish
from smg_wire.errors import INTERNAL_MESSAGE, SmgError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from smg_grpc_servicer.mlx.alignment import Align
    from smg_grpc_servicer.mlx.config import EngineConfig, MlxRequest
    from smg_grpc_servicer.mlx.prefix_cache import PrefixCache

logger = logging.getLogger(__name__)

Result = tuple[str, "Delta | SmgError"]

# A prompt shorter than this says more about the overhead of a step than about its tokens.
_MEASURABLE_TOKENS = 32


@dataclass(slots=True)
class _Row:
    """A request that is in the generator."""

    engine_id: str
    request: MlxRequest
    cached: int
    # Prompt tokens still to be read, the last one apart: it is read with the first step of
    # generation. None once the generator has moved the request on to generation.
    unread: int | None
    raw: RawLogits | None
    functions: RowFunctions
    generated: int = 0


class Batcher:
    """Admits requests to mlx-lm's `BatchGenerator` and reads tokens off it, a step at a time.

    The generator is never told of stop tokens and lengths: it would take requests out one
    kind at a time and by a protocol that differs from release to release. They are checked
    here, and all that ended in a step leave in one `remove`.
    """

    def __init__(
        self,
        generator: Any,
        prefix_cache: PrefixCache,
        config: EngineConfig,
        prefill_step_size: int,
        *,
        align: Align | None = None,
        snapshots: bool = False,
    ) -> None:
        """Take over a generator.

        Args:
            generator: made on this thread.
            prefix_cache: where the state of ended requests goes.
            config: for the sizes of the batches.
            prefill_step_size: prompt tokens of one request in one step.
            align: what keeps rows and their functions together, if this release of mlx-lm does
                not do so itself.
            snapshots: whether the model's caches may not be trimmable, so that the state at the
                end of a prompt must be kept by itself to be of use to the next turn.
        """
        self._generator = generator
        self._prefix_cache = prefix_cache
        self._config = config
        self._prefill_step_size = prefill_step_size
        self._align = align
        self._snapshots = snapshots
        self._waiting: dict[str, MlxRequest] = {}
        self._rows: dict[int, _Row] = {}
        self._uids: dict[str, int] = {}
        self._ended: list[int] = []
        self.seconds_per_token = 0.0

    @property
    def busy(self) -> bool:
        """Whether there is anything to step or to clear away."""
        return bool(self._rows or self._waiting)

    @property
    def running(self) -> int:
        """Requests in the batch, those included that read their prompts."""
        return len(self._rows)

    @property
    def waiting(self) -> int:
        """Requests that have no place in the batch yet."""
        return len(self._waiting)

    @property
    def coming_prefill_tokens(self) -> int:
        """Prompt tokens that the next step reads, the padding to the longest included."""
        chunks = self._chunks()
        return len(chunks) * max(chunks, default=0)

    def _chunks(self) -> list[int]:
        """Return the prompt tokens that each reading request reads in the next step."""
        return [
            min(row.unread, self._prefill_step_size) for row in self._rows.values() if row.unread
        ]

    def _fits(self, chunks: list[int], request: MlxRequest) -> bool:
        """Whether a request may read beside others without making the step mostly padding.

        All that read in one step are padded to the longest: seven short prompts beside a long
        one would cost as much as eight long ones, and everybody waits for that. A short one
        that may not join now may with the next step.
        """
        wanted = [*chunks, min(len(request.prompt_ids), self._prefill_step_size)]
        padded = len(wanted) * max(wanted)
        return padded <= max(self._prefill_step_size, 2 * sum(wanted))

    def add(self, engine_id: str, request: MlxRequest) -> None:
        """Queue a request."""
        self._waiting[engine_id] = request

    def retire(self, aborted: Iterable[str] = ()) -> None:
        """Take out of the batch what ended in the last step, and what is aborted.

        An id that is not here any more is no error.
        """
        leaving = set(self._ended)
        self._ended.clear()
        for engine_id in aborted:
            self._waiting.pop(engine_id, None)
            if engine_id in self._uids:
                leaving.add(self._uids[engine_id])
        if not leaving:
            return
        keep = self._prefix_cache.enabled
        caches = self._generator.remove(sorted(leaving), return_prompt_caches=keep) or {}
        for uid in leaving:
            row = self._rows.pop(uid)
            del self._uids[row.engine_id]
            cache, tokens = caches.get(uid, (None, ()))
            if cache is not None and len(tokens) > row.cached:
                self._prefix_cache.insert(tokens, cache)

    def admit(self) -> list[Result]:
        """Move requests from the queue into the batch as far as there is room.

        Prefixes are looked up as late as this, so that a request also finds what ended while it
        waited, and a queued request holds no memory of the prefix cache.
        """
        failed: list[Result] = []
        while self._waiting and len(self._rows) < self._config.completion_batch_size:
            chunks = self._chunks()
            engine_id, request = next(iter(self._waiting.items()))
            if len(chunks) >= self._config.prefill_batch_size or not self._fits(chunks, request):
                break
            del self._waiting[engine_id]
            try:
                self._insert(engine_id, request)
            except Exception:
                # One request's fault is not the batch's.
                logger.exception("request %s could not join the batch", engine_id)
                failed.append((engine_id, SmgError(INTERNAL_MESSAGE)))
        return failed

    def _insert(self, engine_id: str, request: MlxRequest) -> None:
        cache, cached = self._prefix_cache.lookup(request.prompt_ids)
        processors = make_logits_processors(request.sampling, request.prompt_ids)
        raw = None
        if processors and request.logprobs is not None:
            raw = RawLogits()
            processors.insert(0, raw)
        functions = RowFunctions(make_sampler(request.sampling), processors)
        (uid,) = self._generator.insert(
            [request.prompt_ids[cached:]],
            max_tokens=[sys.maxsize],
            caches=[cache],
            all_tokens=[request.prompt_ids[:cached]],
            samplers=[functions.sampler],
            logits_processors=[functions.processors],
        )
        unread = len(request.prompt_ids) - cached - 1
        self._rows[uid] = _Row(engine_id, request, cached, unread, raw, functions)
        self._uids[engine_id] = uid

    def step(self) -> list[Result]:
        """Generate a token for each request in generation, then read on in the prompts.

        Call `retire` before the next step.
        """
        prefill_tokens = self.coming_prefill_tokens
        began = time.perf_counter()
        if self._align is not None:
            rows = {uid: row.functions for uid, row in self._rows.items()}
            self._align(self._generator, rows)
        progress, responses = self._generator.next()
        if prefill_tokens >= _MEASURABLE_TOKENS:
            self.seconds_per_token = (time.perf_counter() - began) / prefill_tokens
        for report in progress:
            self._note_progress(report)
        return [self._read(response) for response in responses]

    def _note_progress(self, report: Any) -> None:
        row = self._rows[report.uid]
        if report.end_of_prompt:
            row.unread = None
            return
        done, total = report.progress
        row.unread = total - 1 - done
        if self._snapshots and row.unread == 0 and self._prefix_cache.enabled:
            cache, tokens = self._generator.extract_cache([report.uid])[report.uid]
            self._prefix_cache.insert(tokens, cache)

    def _read(self, response: Any) -> Result:
        row = self._rows[response.uid]
        request = row.request
        token = response.token
        row.generated += 1
        row.unread = None
        logprobs = None
        if request.logprobs is not None:
            source = response.logprobs if row.raw is None else row.raw.take()
            logprobs = token_logprobs(source, token, request.logprobs)
        finish = None
        if token in request.stop_token_ids:
            finish = Finish(STOP, token)
        elif row.generated >= request.max_tokens:
            finish = Finish(LENGTH)
        if finish is not None:
            self._ended.append(response.uid)
        return row.engine_id, Delta(
            index=0,
            token_ids=[token],
            prompt_tokens=len(request.prompt_ids),
            completion_tokens=row.generated,
            cached_tokens=row.cached,
            logprobs=logprobs,
            finish=finish,
        )

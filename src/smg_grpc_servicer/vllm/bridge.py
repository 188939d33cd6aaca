"""`AsyncLLM` as the serving core uses it: requests in, deltas pushed out, one abort at most."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from smg_grpc_servicer.vllm.errors import from_vllm
from smg_grpc_servicer.vllm.outputs import EmbeddingConverter, OutputConverter
from smg_wire.errors import EngineDead, EngineRefusal, InvalidRequest, SmgError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from smg_grpc_servicer.loads import Forwarded, LoadBoard
    from smg_grpc_servicer.serving.generation import Generation
    from smg_grpc_servicer.vllm.requests import Plan

_logger = logging.getLogger(__name__)


@dataclass
class _Live:
    """A request that vLLM has or is being given; `internal_id` is vLLM's name for it."""

    generation: Generation
    forwarded: Forwarded | None = None
    internal_id: str | None = None
    submitting: bool = True
    aborted: bool = False


class EngineBridge:
    """Runs requests on an engine client, vLLM's `AsyncLLM` or what acts like it.

    Its `abort` is what `Generations` calls; it speaks last, see there. What the engine has been
    given and has not answered yet is noted on `loads`.
    """

    def __init__(self, client: Any, loads: LoadBoard | None = None) -> None:
        self._client = client
        self._loads = loads
        self._live: dict[str, _Live] = {}
        self._aborts: set[asyncio.Task[None]] = set()
        observability = getattr(client, "observability_config", None)
        self._traces = getattr(observability, "otlp_traces_endpoint", None) is not None

    @property
    def live(self) -> int:
        """Requests that vLLM has been given and has not finished."""
        return len(self._live)

    async def submit(
        self, generation: Generation, plan: Plan, *, trace_headers: Mapping[str, str] | None = None
    ) -> None:
        """Hand a request over; what it brings, a refusal of vLLM's included, goes to `generation`.

        A constraint is compiled on the way, on one of vLLM's threads.
        """
        engine_id = generation.engine_id
        live = self._live[engine_id] = _Live(generation, self._note(plan))
        try:
            queue = await self._client.add_request(
                engine_id,
                _prompt(plan),
                plan.params,
                **_options(plan, trace_headers if self._traces else None),
            )
        except BaseException as error:
            live.submitting = False
            refusal = _refusal(error, plan)
            if refusal is None:
                if live.aborted:
                    self._start_abort(engine_id)
                raise
            # vLLM may have noted the request before it met what it refuses.
            self._start_abort(engine_id)
            generation.fail(refusal)
            return
        live.submitting = False
        live.internal_id = getattr(queue, "request_id", None)
        take = _Receiver(self, generation, plan, live.forwarded).put
        # RequestOutputCollector keeps outputs until a task of its own fetches them. Taken as
        # they are put, they need no such task, and are merged once, in the generation.
        queue.put = take
        try:
            early = queue.get_nowait()
        except Exception as error:
            early = error
        if early is not None:
            take(early)
        if live.aborted:
            self._start_abort(engine_id)

    def abort(self, engine_id: str) -> None:
        """Have vLLM drop a request, once; an id that is not live is no error."""
        live = self._live.get(engine_id)
        if live is None:
            return
        if live.submitting:
            # vLLM may not know it yet: it is told when it does.
            live.aborted = True
            live.generation.close_aborted()
            return
        self._start_abort(engine_id)

    def forget(self, engine_id: str) -> None:
        """Note that vLLM has finished a request by itself."""
        self._end(engine_id)

    def _note(self, plan: Plan) -> Forwarded | None:
        if self._loads is None:
            return None
        return self._loads.forwarded(
            len(plan.prompt_ids),
            rank=plan.data_parallel_rank,
            sequences=plan.choices,
            every_step=plan.streams,
        )

    def _end(self, engine_id: str) -> _Live | None:
        live = self._live.pop(engine_id, None)
        if live is not None and live.forwarded is not None:
            live.forwarded.ended()
        return live

    def _start_abort(self, engine_id: str) -> None:
        live = self._end(engine_id)
        if live is not None:
            task = asyncio.get_running_loop().create_task(self._abort(engine_id, live))
            self._aborts.add(task)
            task.add_done_callback(self._aborts.discard)

    async def _abort(self, engine_id: str, live: _Live) -> None:
        try:
            if live.internal_id is None:
                await self._client.abort(engine_id)
            else:
                # By this name vLLM forgets the parent of several choices as well.
                await self._client.abort(live.internal_id, internal=True)
        except Exception as error:
            if not isinstance(from_vllm(error), EngineDead):
                _logger.exception("vLLM did not take the abort of %s", engine_id)
        finally:
            live.generation.close_aborted()


class _Receiver:
    """Takes what vLLM puts for one request, in the place of its collector's `put`."""

    def __init__(
        self,
        bridge: EngineBridge,
        generation: Generation,
        plan: Plan,
        forwarded: Forwarded | None,
    ) -> None:
        self._bridge = bridge
        self._forwarded = forwarded
        self._generation = generation
        pools = hasattr(plan.params, "task")
        self._converter = EmbeddingConverter() if pools else OutputConverter(plan)

    def put(self, output: Any) -> None:
        """Push an output, or fail with an exception.

        Raises nothing: it is called by vLLM's one output task, which serves every request.
        """
        generation = self._generation
        if self._forwarded is not None:
            self._forwarded.produced()
        if isinstance(output, Exception) or output.finished:
            self._bridge.forget(generation.engine_id)
        if generation.over:
            return
        try:
            if isinstance(output, Exception):
                raise output  # noqa: TRY301  (judged below like what a conversion raises)
            for delta in self._converter.convert(output, aborting=generation.aborting):
                generation.push(delta)
        except SmgError as error:
            generation.cut(error)
        except Exception as error:
            generation.cut(self._broken(output, error))

    def _broken(self, output: Any, error: Exception) -> SmgError:
        if output is error:
            # vLLM gives an exception to everyone when its output task ends.
            return from_vllm(error) or EngineDead("the engine's output task has ended")
        _logger.error("an output of vLLM's could not be converted", exc_info=error)
        return SmgError("the engine's output could not be read")


def _prompt(plan: Plan) -> dict[str, Any]:
    if plan.constraint is not None:
        # Without a type it is still to be rendered, which vLLM does on a thread, together with
        # the validation of the constraint (since 0.32; before, both are done at once).
        return {"prompt_token_ids": plan.prompt_ids}
    return {"type": "token", "prompt_token_ids": plan.prompt_ids}


def _options(plan: Plan, trace_headers: Mapping[str, str] | None) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if plan.data_parallel_rank is not None:
        options["data_parallel_rank"] = plan.data_parallel_rank
    if trace_headers:
        options["trace_headers"] = trace_headers
    if plan.constraint is not None and plan.constraint.from_first_token:
        options["reasoning_ended"] = True
    return options


def _refusal(error: BaseException, plan: Plan) -> SmgError | None:
    refusal = from_vllm(error) if isinstance(error, Exception) else None
    if isinstance(refusal, EngineRefusal) and plan.constraint is not None:
        return InvalidRequest(plan.constraint.field, plan.constraint.value, refusal.message)
    return refusal

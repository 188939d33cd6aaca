"""FlushCache, StartProfile, StopProfile and GetTokenizer."""

from __future__ import annotations

import asyncio
import math
import time
from pathlib import Path
from typing import TYPE_CHECKING

from smg_grpc_proto.generated import common_pb2

from smg_wire import tokenizer_bundle
from smg_wire.errors import FailedPrecondition, InvalidRequest, SmgError, UnsupportedField

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from vllm.config import VllmConfig
    from vllm.engine.protocol import EngineClient

    from smg_grpc_servicer.serving.generation import Generations
    from smg_wire.tokenizer_bundle import Bundle

# An answer is written a step before the engine frees the request's blocks, so the engine may
# refuse for a moment after the last request has ended.
_SETTLE_SECONDS = 0.5
_RETRY_SECONDS = 0.02

_NEITHER = "vLLM's profiler is configured at its launch, see --profiler-config"


class CacheFlusher:
    """Empties the engine's prefix cache without touching a running request."""

    def __init__(self, engine_client: EngineClient, generations: Generations) -> None:
        self._engine_client = engine_client
        self._generations = generations

    async def flush(self, request: common_pb2.FlushCacheRequest) -> common_pb2.FlushCacheResponse:
        """Wait up to `timeout_s` seconds for the engine to be idle, then flush.

        Raises:
            InvalidRequest: the timeout is negative or not finite.
        """
        timeout = request.timeout_s
        if not math.isfinite(timeout) or timeout < 0:
            raise InvalidRequest("timeout_s", timeout, "must be a finite number of at least 0")
        deadline = time.monotonic() + timeout
        while True:
            if not await self._idle(deadline):
                busy = self._generations.in_flight
                return common_pb2.FlushCacheResponse(
                    success=False, message=f"{busy} requests are running; nothing was flushed"
                )
            if await self._reset():
                return common_pb2.FlushCacheResponse(success=True, message="prefix cache flushed")
            # The engine's own view, which also counts requests that another client of it has.
            if time.monotonic() >= deadline:
                return common_pb2.FlushCacheResponse(
                    success=False, message="the engine still uses blocks; nothing was flushed"
                )

    async def _idle(self, deadline: float) -> bool:
        if not self._generations.in_flight:
            return True
        left = deadline - time.monotonic()
        if left <= 0:
            return False
        try:
            await asyncio.wait_for(self._generations.drained(), left)
        except asyncio.TimeoutError:
            return False
        return True

    async def _reset(self) -> bool:
        settled = time.monotonic() + _SETTLE_SECONDS
        while not self._generations.in_flight:
            if await self._engine_client.reset_prefix_cache():
                return True
            if time.monotonic() >= settled:
                break
            await asyncio.sleep(_RETRY_SECONDS)
        return False


class Profiler:
    """Starts and stops the profiler that vLLM was launched with."""

    def __init__(self, engine_client: EngineClient, config: VllmConfig) -> None:
        self._engine_client = engine_client
        # One config since 0.13; a variable before.
        self._config = getattr(config, "profiler_config", None)

    async def start(self, request: common_pb2.StartProfileRequest) -> common_pb2.ProfileResponse:
        """Start profiling on every rank.

        Raises:
            UnsupportedField: a field that vLLM takes at its launch only.
            InvalidRequest: a count of steps that cannot be one.
            FailedPrecondition: no profiler is configured, or one runs already.
        """
        bounds = _bounds(request)
        self._check_enabled()
        try:
            await self._engine_client.start_profile(**bounds)
        except TypeError as error:
            # Before 0.31 it takes no bounds.
            field = "start_step" if request.HasField("start_step") else "num_steps"
            raise UnsupportedField(field, "this release of vLLM takes no bounds") from error
        except Exception as error:
            raise _profiler_error(error) from error
        return common_pb2.ProfileResponse(success=True, message="profiling started")

    async def stop(self) -> common_pb2.ProfileResponse:
        """Stop profiling and export the traces.

        Raises:
            FailedPrecondition: no profiler is configured.
        """
        self._check_enabled()
        try:
            await self._engine_client.stop_profile()
        except Exception as error:
            raise _profiler_error(error) from error
        return common_pb2.ProfileResponse(success=True, message="profiling stopped")

    def _check_enabled(self) -> None:
        if getattr(self._config, "profiler", None) is None:
            raise FailedPrecondition(
                "profiling is not enabled: start the worker with --profiler-config, for example "
                '\'{"profiler": "torch", "torch_profiler_dir": "/tmp/profile"}\''
            )


def _bounds(request: common_pb2.StartProfileRequest) -> dict[str, int]:
    for field in ("output_dir", "with_stack", "record_shapes"):
        if request.HasField(field):
            raise UnsupportedField(field, _NEITHER)
    if request.activities:
        raise UnsupportedField("activities", _NEITHER)
    if request.profile_by_stage:
        raise UnsupportedField("profile_by_stage", "vLLM does not profile by stage")
    bounds = {}
    if request.HasField("start_step"):
        # vLLM counts from now; the wire's step is one of the engine's own count, which it
        # does not tell.
        raise UnsupportedField("start_step", "vLLM counts steps from the start of profiling")
    if request.HasField("num_steps"):
        if request.num_steps < 1:
            raise InvalidRequest("num_steps", request.num_steps, "must be at least 1")
        bounds["max_iterations"] = request.num_steps
    return bounds


def _profiler_error(error: Exception) -> SmgError:
    # Both come back from the engine's process, where a class of vLLM's own may not survive.
    if type(error).__name__ == "ProfilerAlreadyActiveError":
        return FailedPrecondition("profiling runs already: stop it first")
    if isinstance(error, SmgError):
        return error
    return FailedPrecondition(f"vLLM's profiler refused: {error}")


class TokenizerFiles:
    """The tokenizer's files, packed once."""

    def __init__(self, config: VllmConfig) -> None:
        self._model = config.model_config
        self._packing: asyncio.Future[Bundle] | None = None

    async def chunks(self) -> AsyncIterator[common_pb2.GetTokenizerChunk]:
        """Yield the zip's chunks.

        Raises:
            FailedPrecondition: the files are not on this machine, or are no tokenizer.
        """
        if self._packing is None or (
            self._packing.done() and (self._packing.cancelled() or self._packing.exception())
        ):
            self._packing = asyncio.ensure_future(asyncio.to_thread(self._pack))
        # Shielded: one caller that leaves must not cancel the packing for the others.
        bundle = await asyncio.shield(self._packing)
        for data, sha256 in bundle.chunks():
            yield common_pb2.GetTokenizerChunk(data=data, sha256=sha256)

    def _pack(self) -> Bundle:
        return tokenizer_bundle.pack(local_directory(self._model.tokenizer, self._revision))

    @property
    def _revision(self) -> str | None:
        revision: str | None = getattr(self._model, "tokenizer_revision", None)
        return revision


def local_directory(name: str, revision: str | None) -> Path:
    """Return the directory of a model given as one, or by hub name and in the local cache.

    Raises:
        FailedPrecondition: it is neither; the network is never asked.
    """
    path = Path(name)
    if path.is_dir():
        return path
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    for file in ("tokenizer_config.json", "tokenizer.json", "config.json"):
        try:
            found = try_to_load_from_cache(name, file, revision=revision)
        except HFValidationError as error:
            raise FailedPrecondition(f"no tokenizer files: {name} is no directory here") from error
        if isinstance(found, str):
            return Path(found).parent
    raise FailedPrecondition(
        f"no tokenizer files: {name} is no directory here and not in the local hub cache"
    )

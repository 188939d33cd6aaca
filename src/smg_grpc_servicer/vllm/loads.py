"""vLLM's own statistics as loads, and what GetLoads answers with."""

from __future__ import annotations

import logging
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from smg_grpc_servicer.loads import Capacity, LoadBoard, Step
from smg_wire.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vllm.config import VllmConfig
    from vllm.v1.metrics.stats import IterationStats, SchedulerStats

    from smg_grpc_servicer.loads import RankLoad

_logger = logging.getLogger(__name__)

# The sections that any engine's GetLoads has. vLLM reports the first; the others are empty.
_CORE = ("core", "all")
_SECTIONS = (*_CORE, "memory", "spec", "lora", "disagg", "queues")


def managed_ranks(engine_client: Any) -> list[int]:
    """Return the data-parallel ranks of this engine client, by their global numbers."""
    core = getattr(engine_client, "engine_core", None)
    ranks = getattr(core, "engine_ranks_managed", None)
    return list(ranks) if ranks else [0]


def load_board(engine_client: Any, config: VllmConfig) -> LoadBoard:
    """Return a board of this client's ranks, fed by the engine's statistics from now on.

    With --disable-log-stats the engine makes none: then nothing is known of any rank.
    """
    ranks = managed_ranks(engine_client)
    manager = getattr(engine_client, "logger_manager", None)
    capacity = _capacity(config, len(ranks), reports_steps=manager is not None)
    board = LoadBoard(dict.fromkeys(ranks, capacity))
    if manager is None:
        _logger.warning("the engine makes no statistics (--disable-log-stats): no loads are known")
    else:
        # After construction, and by duck type: vLLM's launcher takes no loggers of ours.
        manager.stat_loggers.append(LoadStatLogger(board))
    return board


def _capacity(config: VllmConfig, ranks: int, *, reports_steps: bool) -> Capacity:
    cache = config.cache_config
    # The client adds up the blocks of all its engines. Where blocks of several kinds share the
    # memory, vLLM's own count of tokens (since 0.31) is right and the product is not.
    blocks = (cache.num_gpu_blocks or 0) // ranks
    tokens = getattr(cache, "kv_cache_size_tokens", None) or blocks * cache.block_size
    return Capacity(
        max_running=config.scheduler_config.max_num_seqs,
        total_tokens=tokens or None,
        # One block stands for "no block", and is counted neither as used nor as free.
        reserved_tokens=cache.block_size,
        block_size=cache.block_size,
        reports_steps=reports_steps,
    )


class LoadStatLogger:
    """Stands in `StatLoggerManager.stat_loggers` and hands each step's statistics to a board.

    vLLM counts an exception in `record` as the death of its output loop, so none leaves it.
    """

    def __init__(self, board: LoadBoard) -> None:
        self._board = board
        self._failed = False

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
        mm_cache_stats: object = None,
        engine_idx: int = 0,
    ) -> None:
        """Take one output of an engine: a step's statistics, its tokens, or both."""
        del mm_cache_stats
        try:
            if scheduler_stats is None:
                self._board.heard(engine_idx)
            else:
                self._board.observe(engine_idx, step_of(scheduler_stats, iteration_stats))
        except Exception:
            if not self._failed:
                _logger.exception("vLLM's statistics cannot be read: no loads are known")
            self._failed = True

    def log_engine_initialized(self) -> None:
        """Have nothing to say at the start."""

    def log(self) -> None:
        """Have nothing to say at intervals."""

    def record_sleep_state(self, sleep: int = 0, level: int = 0) -> None:
        """Take no interest in sleep."""

    def record_admission_rejection(self, reason: str) -> None:
        """Take no interest in the requests that vLLM's own front end refuses (since 0.32)."""


def step_of(scheduler: SchedulerStats, iteration: IterationStats | None) -> Step:
    """Return one step's figures; waiting counts requests that the scheduler deferred, too."""
    prefix = scheduler.prefix_cache_stats
    return Step(
        running=scheduler.num_running_reqs,
        # A count of its own since 0.30; before that it was within the other.
        waiting=scheduler.num_waiting_reqs + getattr(scheduler, "num_skipped_waiting_reqs", 0),
        usage=scheduler.kv_cache_usage,
        # vLLM counts cached blocks that no request uses as free, so both usages are one.
        active_usage=scheduler.kv_cache_usage,
        generated_tokens=0 if iteration is None else iteration.num_generation_tokens,
        cache_requests=prefix.requests if prefix else 0,
        cache_queries=prefix.queries if prefix else 0,
        cache_hits=prefix.hits if prefix else 0,
        cache_reset=bool(prefix and prefix.reset),
    )


def loads_response(
    request: pb.GetLoadsRequest, board: LoadBoard, version: str
) -> pb.GetLoadsResponse:
    """Answer GetLoads: a rank of which nothing is known, or that is not here, is left out.

    Raises:
        InvalidRequest: `include` names a section that no engine has.
    """
    for section in request.include:
        if section not in _SECTIONS:
            raise InvalidRequest("include", section, f"must be one of {', '.join(_SECTIONS)}")
    core = not request.include or any(section in _CORE for section in request.include)
    loads: Iterable[RankLoad] = board.loads()
    if request.HasField("dp_rank"):
        loads = [load for load in loads if load.rank == request.dp_rank]
    answers = [_scheduler_load(load) if core else _rank_only(load) for load in loads]
    return pb.GetLoadsResponse(
        timestamp=datetime.now(timezone.utc).isoformat(),
        version=version,
        dp_rank_count=len(answers),
        loads=answers,
    )


def _rank_only(load: RankLoad) -> pb.SchedulerLoad:
    return pb.SchedulerLoad(dp_rank=load.rank)


def _scheduler_load(load: RankLoad) -> pb.SchedulerLoad:
    # None leaves a field unset, which is all that this wire has for what is not known.
    return pb.SchedulerLoad(
        dp_rank=load.rank,
        num_running_reqs=load.running,
        num_waiting_reqs=load.waiting,
        num_total_reqs=load.running + load.waiting,
        num_used_tokens=load.used_tokens,
        max_total_num_tokens=load.total_tokens,
        token_usage=load.token_usage,
        gen_throughput=load.gen_throughput,
        cache_hit_rate=load.cache_hit_rate,
        utilization=load.token_usage,
        max_running_requests=load.max_running,
        num_waiting_uncached_tokens=load.waiting_uncached_tokens,
    )

"""What the worker asks of vLLM's engine client beside generation: facts, death, shutdown."""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
from typing import TYPE_CHECKING, Any

from smg_wire.errors import EngineDead

if TYPE_CHECKING:
    from collections.abc import Iterable

    from prometheus_client import CollectorRegistry, Metric
    from vllm.config import VllmConfig
    from vllm.engine.protocol import EngineClient

_logger = logging.getLogger(__name__)

# vLLM marks a dead engine and tells nobody who has no request running. A tenth of a second is
# soon enough for those who wait, and nothing in cost.
_POLL_SECONDS = 0.1
_KILL_SECONDS = 1.0


def slots(config: VllmConfig) -> int:
    """Return how many sequences run at once, over all ranks that this client feeds."""
    per_rank: int = config.scheduler_config.max_num_seqs
    parallel = config.parallel_config
    if parallel.data_parallel_external_lb:
        return per_rank
    ranks: int = (
        parallel.data_parallel_size_local
        if parallel.data_parallel_hybrid_lb
        else parallel.data_parallel_size
    )
    return per_rank * max(1, ranks)


def served_model_name(config: VllmConfig) -> str:
    """Return the name that clients see; of several aliases vLLM keeps the first."""
    model = config.model_config
    name: str | list[str] | None = model.served_model_name
    if isinstance(name, (list, tuple)):
        name = name[0] if name else None
    return str(name or model.model)


async def died(engine_client: EngineClient) -> EngineDead:
    """Wait for the engine's death and return its reason."""
    while not engine_client.errored:  # noqa: ASYNC110 - vLLM has no event to wait for
        await asyncio.sleep(_POLL_SECONDS)
    return EngineDead("vLLM's engine has died; its log says why")


def shut_down(engine_client: EngineClient) -> None:
    """Stop the engine's processes. Blocks for as long as vLLM takes; never raises."""
    try:
        engine_client.shutdown()
    except Exception:
        _logger.warning("the engine did not stop cleanly", exc_info=True)


def kill_children() -> None:
    """End what is left of the processes that this one started, engine cores in boot included."""
    children = multiprocessing.active_children()
    for child in children:
        child.terminate()
    for child in children:
        child.join(_KILL_SECONDS)
        if child.is_alive():
            child.kill()


class _EngineMetrics:
    """vLLM's own families, which live in the process's default registry."""

    def collect(self) -> Iterable[Metric]:
        """Return them as they are now."""
        from prometheus_client import REGISTRY

        return REGISTRY.collect()

    def describe(self) -> Iterable[Metric]:
        """Return nothing: which families there are is known once the engine runs."""
        return ()


def export_metrics(registry: CollectorRegistry) -> None:
    """Show vLLM's own metrics beside the worker's, on the same port."""
    collector: Any = _EngineMetrics()
    registry.register(collector)

"""As much of vLLM as its converters touch, for tests in an environment without it."""

from __future__ import annotations

import enum
import sys
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest


class VLLMClientError(Exception):
    pass


class VLLMValidationError(VLLMClientError):
    pass


class VLLMNotFoundError(VLLMClientError):
    pass


class QueueOverflowError(Exception):
    pass


class EngineDeadError(Exception):
    pass


class RequestOutputKind(enum.Enum):
    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


class SamplingParams(SimpleNamespace):
    """Keeps what it is given; refuses what vLLM alone decides on."""

    def __init__(self, **values: Any) -> None:
        super().__init__(**values)
        if values.get("temperature") == 0 and values.get("n", 1) > 1:
            raise VLLMValidationError(f"n must be 1 when using greedy sampling, got {self.n}.")
        if values.get("temperature", 1) > 2:
            raise VLLMValidationError("temperature must be in [0, 2]")


class PoolingParams(SimpleNamespace):
    pass


class StructuredOutputsParams(SimpleNamespace):
    pass


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have `import vllm` find this one."""
    from smg_grpc_servicer.vllm import errors

    modules = {
        "vllm": {
            "SamplingParams": SamplingParams,
            "PoolingParams": PoolingParams,
            "envs": SimpleNamespace(VLLM_MAX_N_SEQUENCES=16384),
        },
        "vllm.sampling_params": {
            "RequestOutputKind": RequestOutputKind,
            "StructuredOutputsParams": StructuredOutputsParams,
        },
        "vllm.exceptions": {
            "VLLMClientError": VLLMClientError,
            "VLLMValidationError": VLLMValidationError,
            "VLLMNotFoundError": VLLMNotFoundError,
            "QueueOverflowError": QueueOverflowError,
        },
        "vllm.v1": {},
        "vllm.v1.engine": {},
        "vllm.v1.engine.exceptions": {"EngineDeadError": EngineDeadError},
    }
    made = {name: ModuleType(name) for name in modules}
    for name, names in modules.items():
        for attribute, value in names.items():
            setattr(made[name], attribute, value)
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(made[parent], child, made[name])
        monkeypatch.setitem(sys.modules, name, made[name])
    errors.known.cache_clear()


def completion(
    index: int = 0,
    token_ids: tuple[int, ...] = (),
    finish_reason: str | None = None,
    stop_reason: int | str | None = None,
    **more: Any,
) -> SimpleNamespace:
    """A CompletionOutput."""
    return SimpleNamespace(
        index=index,
        token_ids=list(token_ids),
        finish_reason=finish_reason,
        stop_reason=stop_reason,
        logprobs=None,
        **more,
    )


def output(*choices: SimpleNamespace, finished: bool | None = None, **more: Any) -> SimpleNamespace:
    """A RequestOutput."""
    values: dict[str, Any] = {
        "prompt_token_ids": [1, 2, 3],
        "num_cached_tokens": 2,
        "prompt_logprobs": None,
        "kv_transfer_params": None,
        "metrics": None,
        "outputs": list(choices),
        "finished": all(one.finish_reason for one in choices) if finished is None else finished,
    }
    return SimpleNamespace(**{**values, **more})


class Collector:
    """A RequestOutputCollector: what it is given stays there until it is fetched."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self._held: Any = None

    def put(self, given: Any) -> None:
        self._held = given

    def get_nowait(self) -> Any:
        held, self._held = self._held, None
        if isinstance(held, Exception):
            raise held
        return held


class EngineClient:
    """An AsyncLLM that does as it is told.

    `refuse` is raised by the next `add_request`, `early` is put before it returns, and `hold`
    keeps it from returning.
    """

    def __init__(self) -> None:
        self.collectors: dict[str, Collector] = {}
        self.added: list[tuple[Any, Any, dict[str, Any]]] = []
        self.aborted: list[tuple[str, bool]] = []
        self.refuse: BaseException | None = None
        self.early: Any = None
        self.last_words: Any = None
        self.hold: Any = None

    async def add_request(self, request_id: str, prompt: Any, params: Any, **more: Any) -> Any:
        self.added.append((prompt, params, more))
        if self.hold is not None:
            await self.hold.wait()
        if self.refuse is not None:
            raise self.refuse
        collector = self.collectors[request_id] = Collector(f"{request_id}-internal")
        if self.early is not None:
            collector.put(self.early)
        return collector

    async def abort(self, request_id: str, internal: bool = False) -> None:
        self.aborted.append((request_id, internal))
        if self.last_words is not None:
            for collector in self.collectors.values():
                collector.put(self.last_words)

    @property
    def only(self) -> Collector:
        (collector,) = self.collectors.values()
        return collector

"""What GetModelInfo and GetServerInfo answer.

The router makes a label of every field that is set, so a field whose truth is not known stays
unset, and one that is known is spelled as routers know it.
"""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from smg_grpc_servicer.vllm.engine import served_model_name
from smg_wire.shm_namespace import shm_namespace_id

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from vllm.config import VllmConfig
    from vllm.engine.protocol import EngineClient

    from smg_grpc_servicer.settings import VllmSettings
    from smg_grpc_servicer.vllm.worker import VllmWorker

# The name by which routers know this kind of worker.
SERVER_TYPE = "vllm-grpc"

# What a request of the router can carry, by vLLM's names.
_MODALITIES = ("audio", "image", "video")
_VISUAL = ("image", "video")


@dataclass(frozen=True)
class MediaFacts:
    """What the model takes beside text; empty for a text model.

    Args:
        limits: most items of one prompt, by modality.
        encoder_budget: most feature tokens that one item may have; 0 when there is no encoder.
    """

    limits: Mapping[str, int]
    encoder_budget: int = 0


NO_MEDIA = MediaFacts({})


def media_facts(engine_client: EngineClient) -> MediaFacts:
    """Return what the engine's own front end holds media to. Takes seconds: not for a loop."""
    if not engine_client.model_config.is_multimodal_model:
        return NO_MEDIA
    from vllm.multimodal import MULTIMODAL_REGISTRY
    from vllm.multimodal.encoder_budget import MultiModalBudget

    budget = MultiModalBudget(engine_client.vllm_config, MULTIMODAL_REGISTRY, enable_cache=False)
    limits = {
        name: int(budget.mm_limits[name])
        for name in _MODALITIES
        if budget.mm_limits.get(name, 0) > 0
    }
    return MediaFacts(limits, min(budget.encoder_compute_budget, budget.encoder_cache_size))


def model_info(config: VllmConfig, media: MediaFacts) -> pb.GetModelInfoResponse:
    """Return the model's facts; ids that the model does not have stay unset (0 on this wire)."""
    model = config.model_config
    special = _SpecialTokens(model)
    defaults = model.get_diff_sampling_param()
    return pb.GetModelInfoResponse(
        model_path=model.model,
        is_generation=model.runner_type == "generate",
        max_context_length=model.max_model_len,
        vocab_size=model.get_vocab_size(),
        supports_vision=any(name in media.limits for name in _VISUAL),
        served_model_name=served_model_name(config),
        tokenizer_path="" if model.skip_tokenizer_init else model.tokenizer,
        model_type=model.hf_config.model_type,
        architectures=getattr(model.hf_config, "architectures", None) or model.architectures,
        eos_token_ids=special.ends,
        pad_token_id=special.one("pad_token_id"),
        bos_token_id=special.one("bos_token_id"),
        # As routers have it of vLLM: the room for the answer is not taken off.
        max_req_input_len=model.max_model_len,
        default_sampling_params_json=json.dumps(defaults, sort_keys=True) if defaults else "",
    )


class _SpecialTokens:
    """The model's special ids: a vision model keeps them with its language part."""

    def __init__(self, model: Any) -> None:
        self._generation = model.try_get_generation_config() or {}
        self._configs = [model.hf_config, model.hf_text_config]

    def _all(self, name: str) -> Iterator[Any]:
        for config in self._configs:
            yield getattr(config, name, None)
        yield self._generation.get(name)

    def one(self, name: str) -> int:
        """Return the first that is an id, or 0."""
        return next((int(found) for found in self._all(name) if isinstance(found, int)), 0)

    @property
    def ends(self) -> list[int]:
        """Every id that ends a turn, those that only the generation config names included."""
        ends: list[int] = []
        for found in self._all("eos_token_id"):
            several = found if isinstance(found, (list, tuple)) else [found]
            ends += [int(token) for token in several if token is not None]
        return list(dict.fromkeys(ends))


@dataclass(frozen=True)
class Activity:
    """What changes while the worker runs. Times are `time.time()`, 0.0 for never."""

    active_requests: int
    paused: bool
    last_receive: float
    uptime_seconds: float


def server_info(
    config: VllmConfig, settings: VllmSettings, media: MediaFacts, activity: Activity
) -> pb.GetServerInfoResponse:
    """Return the server's facts, and what it is doing."""
    model, cache = config.model_config, config.cache_config
    dtype = str(model.dtype)
    response = pb.GetServerInfoResponse(
        active_requests=activity.active_requests,
        is_paused=activity.paused,
        last_receive_timestamp=activity.last_receive,
        uptime_seconds=activity.uptime_seconds,
        server_type=SERVER_TYPE,
        data_parallel_size=config.parallel_config.data_parallel_size,
        shm_namespace_id=shm_namespace_id(),
        kv_cache_dtype=str(cache.cache_dtype),
        block_size=cache.block_size or 0,
        attention_backend=_attention_backend(config),
        model_dtype=dtype,
        pairing_protocol=settings.pairing_protocol or "",
        mm_device_do_normalize=_normalizes_on_device(model),
        max_num_seqs=config.scheduler_config.max_num_seqs,
        mm_item_limits=",".join(f"{name}={media.limits[name]}" for name in sorted(media.limits)),
        multimodal_encoder_dtype=dtype.removeprefix("torch."),
        mm_encoder_budget=media.encoder_budget,
    )
    transfer = config.kv_transfer_config
    if transfer is not None:
        response.kv_connector = transfer.kv_connector or ""
        response.kv_role = transfer.kv_role or ""
        response.kv_engine_id = transfer.engine_id or ""
    parser, start = _grammar(config)
    response.engine_reasoning_parser = parser
    response.constrained_decoding_start = start
    return response


def _attention_backend(config: VllmConfig) -> str:
    # A config of its own since 0.12.
    backend = getattr(getattr(config, "attention_config", None), "backend", None)
    return "" if backend is None else str(getattr(backend, "name", backend))


def _normalizes_on_device(model: Any) -> bool:
    return bool(getattr(model.multimodal_config, "mm_device_do_normalize", False))


def _grammar(config: VllmConfig) -> tuple[str, str]:
    """Return the reasoning parser and where a grammar starts, both empty when not known."""
    outputs = getattr(config, "structured_outputs_config", None)
    if outputs is None:
        return "", ""
    parser: str = outputs.reasoning_parser or ""
    waits = bool(parser) and not outputs.enable_in_reasoning
    return parser, "after_reasoning" if waits else "first_token"


class Description:
    """What a worker says of itself.

    Args:
        worker: the worker.
        started: the `time.time()` at which its process started.
    """

    def __init__(self, worker: VllmWorker, started: float) -> None:
        self._worker = worker
        self._started = started
        self._last_receive = 0.0
        # From now on, so that the first who asks does not wait for it.
        self._media = asyncio.ensure_future(asyncio.to_thread(media_facts, worker.engine_client))

    def received(self) -> None:
        """Note that a request for the engine has come."""
        self._last_receive = time.time()

    async def model(self) -> pb.GetModelInfoResponse:
        """Describe the model."""
        return model_info(self._worker.config, await asyncio.shield(self._media))

    async def server(self) -> pb.GetServerInfoResponse:
        """Describe the worker, and what it is doing."""
        worker = self._worker
        activity = Activity(
            active_requests=worker.generations.in_flight,
            paused=await worker.engine_client.is_paused(),
            last_receive=self._last_receive,
            uptime_seconds=time.time() - self._started,
        )
        media = await asyncio.shield(self._media)
        return server_info(worker.config, worker.settings, media, activity)

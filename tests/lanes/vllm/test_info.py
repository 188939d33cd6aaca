"""Every field of GetModelInfo and GetServerInfo, for a text model and for a vision model."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from google.protobuf.json_format import MessageToDict
from smg_grpc_proto.generated import common_pb2, vllm_engine_pb2_grpc
from smg_grpc_proto.generated import vllm_engine_pb2 as pb
from tests.conformance.reading import failure
from tests.support.vllm_launch import BOOT_SECONDS, EAGER, entry_points, model_directory, start

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.processes import Process

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return entry_points(tmp_path_factory.mktemp("path"))


@pytest.fixture(scope="module")
def text_worker(path: str) -> Iterator[Process]:
    options = (*EAGER, "--served-model-name", "smollm2", "also")
    with start("vllm serve --grpc", model_directory("smollm2"), path, *options) as worker:
        yield worker.until_serving(BOOT_SECONDS)


@pytest.fixture(scope="module")
def vision_worker(path: str) -> Iterator[Process]:
    options = ("--enforce-eager", "--limit-mm-per-prompt", '{"image":4,"video":1}')
    options += ("--reasoning-parser", "qwen3", "--attention-backend", "CPU_ATTN")
    env = {"SMG_PAIRING_PROTOCOL": "pair-1"}
    with start("ours", model_directory("tiny-qwen3-vl"), path, *options, env=env) as worker:
        yield worker.until_serving(BOOT_SECONDS)


def stub(channel: grpc.aio.Channel) -> Any:
    return vllm_engine_pb2_grpc.VllmEngineStub(channel)


def fields(message: Any) -> dict[str, Any]:
    return MessageToDict(message, preserving_proto_field_name=True)


async def described(worker: Process) -> tuple[dict[str, Any], dict[str, Any]]:
    async with grpc.aio.insecure_channel(worker.address) as channel:
        model = fields(await stub(channel).GetModelInfo(pb.GetModelInfoRequest()))
        server = fields(await stub(channel).GetServerInfo(pb.GetServerInfoRequest()))
    return model, server


def shm_namespace() -> str:
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot_id}:{os.stat('/dev/shm').st_dev}"  # noqa: PTH116 - not as the worker does it


async def test_a_text_model_and_its_worker(text_worker: Process) -> None:
    model, server = await described(text_worker)
    directory = model_directory("smollm2")
    assert model == {
        "model_path": directory,
        "is_generation": True,
        "max_context_length": 2048,
        "vocab_size": 49152,
        "served_model_name": "smollm2",
        "tokenizer_path": directory,
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "eos_token_ids": [2],
        "pad_token_id": 2,
        "bos_token_id": 1,
        "max_req_input_len": 2048,
    }
    assert server.pop("uptime_seconds") > 0
    server.pop("last_receive_timestamp", None)
    assert server == {
        "server_type": "vllm-grpc",
        "data_parallel_size": 1,
        "shm_namespace_id": shm_namespace(),
        "kv_cache_dtype": "auto",
        "block_size": 32,
        "model_dtype": "torch.float32",
        "max_num_seqs": 32,
        "multimodal_encoder_dtype": "float32",
        "constrained_decoding_start": "first_token",
    }


async def test_a_vision_model_and_its_worker(vision_worker: Process) -> None:
    model, server = await described(vision_worker)
    directory = model_directory("tiny-qwen3-vl")
    assert model == {
        "model_path": directory,
        "is_generation": True,
        "max_context_length": 2048,
        "vocab_size": 49216,
        "supports_vision": True,
        "served_model_name": directory,
        "tokenizer_path": directory,
        "model_type": "qwen3_vl",
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "eos_token_ids": [2],
        "pad_token_id": 2,
        "bos_token_id": 1,
        "max_req_input_len": 2048,
    }
    assert server.pop("uptime_seconds") > 0
    assert server == {
        "server_type": "vllm-grpc",
        "data_parallel_size": 1,
        "shm_namespace_id": shm_namespace(),
        "kv_cache_dtype": "auto",
        "block_size": 32,
        "attention_backend": "CPU_ATTN",
        "model_dtype": "torch.bfloat16",
        "pairing_protocol": "pair-1",
        "mm_device_do_normalize": True,
        "max_num_seqs": 32,
        "mm_item_limits": "image=4,video=1",
        "multimodal_encoder_dtype": "bfloat16",
        "engine_reasoning_parser": "qwen3",
        "constrained_decoding_start": "after_reasoning",
        "mm_encoder_budget": 2048,
    }


async def test_what_changes_while_it_serves(text_worker: Process) -> None:
    async with grpc.aio.insecure_channel(text_worker.address) as channel:
        call = stub(channel).Generate(
            pb.GenerateRequest(
                tokenized=pb.TokenizedInput(input_ids=[1, 504, 3575]),
                sampling_params=pb.SamplingParams(max_tokens=400, ignore_eos=True),
                stream=True,
            )
        )
        before = time.time()
        await call.read()
        server = await stub(channel).GetServerInfo(pb.GetServerInfoRequest())
        assert server.active_requests == 1
        assert server.last_receive_timestamp == pytest.approx(before, abs=5)
        busy = await stub(channel).FlushCache(common_pb2.FlushCacheRequest(timeout_s=0.2))
        assert not busy.success
        assert "1 requests are running" in busy.message
        call.cancel()
        idle = await stub(channel).FlushCache(common_pb2.FlushCacheRequest(timeout_s=10))
        assert idle.success, idle.message


async def test_a_profiler_that_was_not_configured_is_a_precondition(text_worker: Process) -> None:
    async with grpc.aio.insecure_channel(text_worker.address) as channel:
        calls = [
            stub(channel).StartProfile(common_pb2.StartProfileRequest()),
            stub(channel).StopProfile(common_pb2.StopProfileRequest()),
        ]
        for call in calls:
            error = await failure(call)
            assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
            assert "--profiler-config" in (error.details() or "")

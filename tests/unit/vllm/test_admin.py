from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import pytest
from smg_grpc_proto.generated import common_pb2

from smg_grpc_servicer.serving.generation import Generations
from smg_grpc_servicer.serving.health import Health, State
from smg_grpc_servicer.vllm import admin
from smg_wire.errors import FailedPrecondition, InvalidRequest, UnsupportedField
from smg_wire.observability import WorkerMetrics
from smg_wire.tokenizer_bundle import check

if TYPE_CHECKING:
    from pathlib import Path

    from tests.unit.vllm.conftest import EngineClient


@pytest.fixture
def generations() -> Generations:
    health = Health()
    health.to(State.SERVING)
    return Generations(
        health=health,
        metrics=WorkerMetrics("fake"),
        abort_engine=lambda _: None,
        slots=4,
        max_queued=4,
    )


class TestFlush:
    @pytest.fixture
    def flusher(self, engine_client: Any, generations: Generations) -> admin.CacheFlusher:
        return admin.CacheFlusher(engine_client, generations)

    async def test_an_idle_engine_is_flushed(self, flusher: admin.CacheFlusher) -> None:
        assert (await flusher.flush(common_pb2.FlushCacheRequest())).success

    async def test_a_busy_one_is_not_and_says_why_at_once(
        self, flusher: admin.CacheFlusher, generations: Generations, engine_client: EngineClient
    ) -> None:
        engine_client.flushes = [True]
        async with generations.open("a"), generations.open("b"):
            began = time.monotonic()
            answer = await flusher.flush(common_pb2.FlushCacheRequest())
            assert time.monotonic() - began < 0.2
        assert not answer.success
        assert "2 requests are running" in answer.message
        assert engine_client.flushes == [True], "the engine was not asked"

    async def test_it_waits_for_the_end_of_what_runs(
        self, flusher: admin.CacheFlusher, generations: Generations
    ) -> None:
        generation = generations.open("a")
        async with generation:
            flushing = asyncio.ensure_future(
                flusher.flush(common_pb2.FlushCacheRequest(timeout_s=10))
            )
            await asyncio.sleep(0.05)
            assert not flushing.done()
        assert (await asyncio.wait_for(flushing, 5)).success

    async def test_but_not_longer_than_it_may(
        self, flusher: admin.CacheFlusher, generations: Generations
    ) -> None:
        async with generations.open("a"):
            answer = await flusher.flush(common_pb2.FlushCacheRequest(timeout_s=0.1))
        assert not answer.success

    async def test_an_engine_that_still_frees_blocks_is_asked_again(
        self, flusher: admin.CacheFlusher, engine_client: EngineClient
    ) -> None:
        engine_client.flushes = [False, False, True]
        assert (await flusher.flush(common_pb2.FlushCacheRequest())).success

    async def test_one_that_never_does_is_reported(
        self, flusher: admin.CacheFlusher, engine_client: EngineClient
    ) -> None:
        engine_client.flushes = [False] * 1000
        answer = await flusher.flush(common_pb2.FlushCacheRequest())
        assert not answer.success
        assert "blocks" in answer.message

    @pytest.mark.parametrize("timeout", [-1.0, float("nan"), float("inf")])
    async def test_a_timeout_that_is_none_is_refused(
        self, flusher: admin.CacheFlusher, timeout: float
    ) -> None:
        with pytest.raises(InvalidRequest, match="timeout_s"):
            await flusher.flush(common_pb2.FlushCacheRequest(timeout_s=timeout))


class TestProfile:
    @pytest.fixture
    def profiler(self, engine_client: Any, vllm_config: Any) -> admin.Profiler:
        vllm_config.profiler_config.profiler = "torch"
        return admin.Profiler(engine_client, vllm_config)

    async def test_it_starts_and_stops(
        self, profiler: admin.Profiler, engine_client: EngineClient
    ) -> None:
        request = common_pb2.StartProfileRequest(num_steps=3)
        assert (await profiler.start(request)).success
        assert (await profiler.start(common_pb2.StartProfileRequest())).success
        assert engine_client.profiles == [{"max_iterations": 3}, {}]
        assert (await profiler.stop()).success

    async def test_without_a_profiler_it_is_a_precondition(
        self, engine_client: Any, vllm_config: Any
    ) -> None:
        profiler = admin.Profiler(engine_client, vllm_config)
        for call in (profiler.start(common_pb2.StartProfileRequest()), profiler.stop()):
            with pytest.raises(FailedPrecondition, match="--profiler-config"):
                await call

    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("output_dir", "/tmp"),
            ("start_step", 2),
            ("activities", ["CPU"]),
            ("with_stack", False),
            ("record_shapes", True),
            ("profile_by_stage", True),
        ],
    )
    async def test_what_vllm_cannot_honour_is_refused_by_name(
        self, profiler: admin.Profiler, field: str, value: Any
    ) -> None:
        with pytest.raises(UnsupportedField, match=f"^{field} "):
            await profiler.start(common_pb2.StartProfileRequest(**{field: value}))

    async def test_a_count_of_steps_is_at_least_one(self, profiler: admin.Profiler) -> None:
        with pytest.raises(InvalidRequest, match="num_steps"):
            await profiler.start(common_pb2.StartProfileRequest(num_steps=0))

    async def test_a_refusal_of_the_engine_is_a_precondition(
        self, profiler: admin.Profiler, engine_client: EngineClient
    ) -> None:
        engine_client.profile_error = type("ProfilerAlreadyActiveError", (Exception,), {})()
        with pytest.raises(FailedPrecondition, match="runs already"):
            await profiler.start(common_pb2.StartProfileRequest())
        engine_client.profile_error = RuntimeError("no such directory")
        with pytest.raises(FailedPrecondition, match="no such directory"):
            await profiler.stop()


class TestTokenizer:
    async def test_a_directory_is_packed_once(self, vllm_config: Any, tmp_path: Path) -> None:
        (tmp_path / "tokenizer.json").write_text("{}")
        vllm_config.model_config.tokenizer = str(tmp_path)
        files = admin.TokenizerFiles(vllm_config)
        chunks = [chunk async for chunk in files.chunks()]
        assert check(b"".join(chunk.data for chunk in chunks), chunks[-1].sha256)
        (tmp_path / "tokenizer.json").unlink()
        assert [chunk async for chunk in files.chunks()] == chunks

    async def test_a_failure_is_tried_again(self, vllm_config: Any, tmp_path: Path) -> None:
        vllm_config.model_config.tokenizer = str(tmp_path)
        files = admin.TokenizerFiles(vllm_config)
        with pytest.raises(FailedPrecondition):
            _ = [chunk async for chunk in files.chunks()]
        (tmp_path / "tokenizer.json").write_text("{}")
        assert [chunk async for chunk in files.chunks()]

    def test_a_hub_name_leads_to_the_cached_snapshot(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        constants = pytest.importorskip("huggingface_hub.constants")
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
        repository = tmp_path / "models--an--model"
        snapshot = repository / "snapshots" / "abc"
        snapshot.mkdir(parents=True)
        (snapshot / "tokenizer.json").write_text("{}")
        (repository / "refs").mkdir()
        (repository / "refs" / "main").write_text("abc")
        assert admin.local_directory("an/model", None) == snapshot

    @pytest.mark.parametrize("name", ["an/absent-model", "/no/such/directory", "no name"])
    def test_what_is_not_on_this_machine_is_a_precondition(
        self, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        constants = pytest.importorskip("huggingface_hub.constants")
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
        with pytest.raises(FailedPrecondition, match="no tokenizer files"):
            admin.local_directory(name, None)

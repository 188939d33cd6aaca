"""Models as operators bring them: adapted, quantised, halved, by name, with ends of their own."""

from __future__ import annotations

import json
import socket
import sys
import time
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from smg_grpc_proto.generated import mlx_engine_pb2 as pb
from smg_grpc_proto.generated import mlx_engine_pb2_grpc
from tests.conformance.driver import Params
from tests.conformance.fixtures import start
from tests.conformance.reading import answer, failure
from tests.lanes.mlx.driver import MlxDriver
from tests.lanes.mlx.library import VOCABULARY, like, references
from tests.lanes.mlx.wire import sampling
from tests.support.processes import Process

from smg_wire.tokenizer_bundle import check, unpack

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.conformance.fixtures import Connect
    from tests.lanes.mlx.conftest import Models
    from typing_extensions import Self

pytestmark = pytest.mark.engine

IDS = [(place * 37 + 11) % 4000 + 10 for place in range(40)]


async def model_info(connect: Connect, worker: Process) -> Any:
    stub = mlx_engine_pb2_grpc.MlxEngineStub(connect.channel(worker))
    return await stub.GetModelInfo(pb.GetModelInfoRequest())


def refused(model: Path, *options: str) -> str:
    """Start a worker that must not start; return its one line of complaint."""
    driver = MlxDriver(str(model))
    with start(driver, *options) as worker:
        assert worker.wait(driver.boot_seconds) == 3
        assert "Traceback" not in worker.output
        (line,) = [line for line in worker.output.splitlines() if line.startswith("error:")]
        assert worker.output.splitlines()[-1] == line
        return line


@pytest.mark.slow
async def test_an_adapter_answers_as_it_does_in_the_library(
    driver: MlxDriver, models: Models, connect: Connect
) -> None:
    adapter = models("adapter")
    prompts = driver.facts.prompts[::2]
    base = references(models.demo, prompts, 24)
    adapted = references(models.demo, prompts, 24, adapter)
    with start(driver, "--adapter-path", str(adapter)) as worker:
        worker.until_serving(driver.boot_seconds)
        client = connect(worker)
        for prompt, without, expected in zip(prompts, base, adapted, strict=True):
            params = Params(max_tokens=24, ignore_eos=False)
            found = await answer(client.generate(prompt, params))
            assert found.token_ids != without.ids
            expected.check(found.token_ids)
            assert len(found.token_ids) >= 16
        assert (await model_info(connect, worker)).vocab_size == driver.facts.vocabulary


async def test_an_adapter_of_a_small_model_answers_as_it_does_in_the_library(
    models: Models, connect: Connect
) -> None:
    model, adapter = models("plain"), models("adapter", of="plain")
    (without,) = references(model, [IDS], 24)
    (expected,) = references(model, [IDS], 24, adapter)
    driver = MlxDriver(str(model))
    with start(driver, "--adapter-path", str(adapter)) as worker:
        worker.until_serving(driver.boot_seconds)
        found = await answer(connect(worker).generate(IDS, Params(max_tokens=24)))
        assert found.token_ids != without.ids
        expected.check(found.token_ids)


def _without_config(adapter: Path) -> str:
    (adapter / "adapter_config.json").unlink()
    return "without adapter_config.json"


def _without_weights(adapter: Path) -> str:
    (adapter / "adapters.safetensors").unlink()
    return "without adapters.safetensors"


def _broken_config(adapter: Path) -> str:
    (adapter / "adapter_config.json").unlink()
    (adapter / "adapter_config.json").write_text("{")
    return "JSONDecodeError"


def _broken_weights(adapter: Path) -> str:
    (adapter / "adapters.safetensors").unlink()
    (adapter / "adapters.safetensors").write_bytes(b"no tensors")
    return "safetensors"


def _of_another_model(adapter: Path) -> str:
    import numpy as np
    from safetensors.numpy import save_file

    (adapter / "adapters.safetensors").unlink()
    save_file(
        {"model.layers.7.mlp.up_proj.lora_a": np.zeros((64, 4), dtype=np.float32)},
        adapter / "adapters.safetensors",
    )
    return "model.layers.7.mlp.up_proj.lora_a"


@pytest.mark.parametrize(
    "spoil",
    [_without_config, _without_weights, _broken_config, _broken_weights, _of_another_model],
)
def test_a_broken_adapter_is_refused_in_one_line_that_names_it(
    models: Models, tmp_path: Path, spoil: Callable[[Path], str]
) -> None:
    adapter = like(models("adapter", of="plain"), tmp_path / "adapter")
    problem = spoil(adapter)
    line = refused(models("plain"), "--adapter-path", str(adapter))
    assert str(adapter) in line
    assert problem in line


def test_an_adapter_that_is_not_there_is_refused_by_name(models: Models) -> None:
    line = refused(models("plain"), "--adapter-path", "/no/such/adapter")
    assert "/no/such/adapter" in line


@pytest.mark.parametrize(
    "of", ["plain", pytest.param(None, marks=pytest.mark.slow)], ids=["small", "demo"]
)
async def test_a_quantised_model_answers_as_it_does_in_the_library(
    models: Models, connect: Connect, of: str | None
) -> None:
    model = models("quantised", of=of)
    assert json.loads((model / "config.json").read_text())["quantization"]["bits"] == 4
    prompt, params = IDS[:5], Params(max_tokens=16)
    (expected,) = references(model, [prompt], 16)
    driver = MlxDriver(str(model))
    with start(driver) as worker:
        worker.until_serving(300)
        # Packed weights are narrower than they are; their rows are the vocabulary all the same.
        assert (await model_info(connect, worker)).vocab_size == VOCABULARY
        client = connect(worker)
        expected.check((await answer(client.generate(prompt, params))).token_ids)


async def test_a_bfloat16_model_answers(models: Models, connect: Connect) -> None:
    model = models("bfloat16", of="plain")
    driver = MlxDriver(str(model))
    (expected,) = references(model, [IDS], 8)
    with start(driver) as worker:
        worker.until_serving(driver.boot_seconds)
        client = connect(worker)
        found = await answer(client.generate(IDS, Params(max_tokens=8, logprobs=2)))
        expected.check(found.token_ids)
        sampled = Params(max_tokens=8, temperature=1.0, seed=1, top_p=0.9, presence_penalty=0.5)
        assert (await answer(client.generate(IDS, sampled))).reason == "length"


def cached(cache: Path, name: str, model: Path) -> dict[str, str]:
    """Lay a model out as the hub's client caches it; return the variables that lead to it."""
    revision = "0123456789abcdef0123456789abcdef01234567"
    repository = cache / f"models--{name.replace('/', '--')}"
    like(model, repository / "snapshots" / revision)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(revision)
    return {"HF_HOME": str(cache), "HF_HUB_CACHE": str(cache)}


COMMAND = [sys.executable, "-m", "smg_grpc_servicer.mlx"]


class Hub:
    """A hub that takes calls and answers none; a worker must not even call."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._socket.setblocking(False)
        url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        # As if its user had asked for the network.
        self.variables = {"HF_ENDPOINT": url, "HTTPS_PROXY": url, "HTTP_PROXY": url}
        self.variables |= {"HF_HUB_OFFLINE": "0", "TRANSFORMERS_OFFLINE": "0"}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    @property
    def called(self) -> bool:
        try:
            self._socket.accept()[0].close()
        except BlockingIOError:
            return False
        return True


async def test_a_cached_name_is_served_under_that_name(
    models: Models, connect: Connect, tmp_path: Path
) -> None:
    with Hub() as hub:
        variables = cached(tmp_path / "hub", "some-org/a-model", models("plain"))
        options = ("--model", "some-org/a-model")
        # grpc too would take the proxy that the hub is reached by.
        env = {**variables, **hub.variables, "NO_PROXY": "127.0.0.1"} | {"HF_HUB_OFFLINE": "1"}
        with Process(*options, command=COMMAND, env=env) as worker:
            worker.until_serving(120)
            info = await model_info(connect, worker)
            assert info.served_model_name == "some-org/a-model"
            assert info.vocab_size == VOCABULARY
            client = connect(worker)
            assert (await answer(client.generate(IDS, Params()))).reason == "length"
            chunks = await client.tokenizer()
            bundle = check(b"".join(data for data, _ in chunks), chunks[-1][1])
            names = {path.name for path in unpack(bundle, tmp_path / "tokenizer")}
            assert {"tokenizer.json", "tokenizer_config.json", "config.json"} <= names
        assert not hub.called


@pytest.mark.parametrize("offline", ["0", "1"])
def test_a_name_that_is_not_cached_is_refused_without_asking_the_hub(
    tmp_path: Path, offline: str
) -> None:
    with Hub() as hub:
        env = {**hub.variables, "HF_HUB_OFFLINE": offline, "HF_HOME": str(tmp_path)}
        env["HF_HUB_CACHE"] = str(tmp_path / "hub")
        began = time.monotonic()
        with Process("--model", "some-org/a-model", command=COMMAND, env=env) as worker:
            assert worker.wait(60) == 3
            assert time.monotonic() - began < 30
            line = worker.output.splitlines()[-1]
            assert line.startswith("error:")
            assert "some-org/a-model" in line
            assert "Traceback" not in worker.output
        assert not hub.called


async def test_a_text_gets_its_beginning_of_sequence_once(
    models: Models, connect: Connect, tmp_path: Path
) -> None:
    model = like(models("plain"), tmp_path / "model", "tokenizer.json")
    tokenizer = json.loads((models.demo / "tokenizer.json").read_text())
    bos = {"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [bos, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [bos, {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B"}}],
        "special_tokens": {
            "<|im_start|>": {"id": "<|im_start|>", "ids": [1], "tokens": ["<|im_start|>"]}
        },
    }
    tokenizer["post_processor"]["pair"][2]["Sequence"]["type_id"] = 1
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    from tokenizers import Tokenizer

    text = "The sea was calm."
    bare = Tokenizer.from_file(str(model / "tokenizer.json")).encode(text, add_special_tokens=False)
    driver = MlxDriver(str(model))
    with start(driver) as worker:
        worker.until_serving(driver.boot_seconds)
        client = connect(worker)
        expected = await answer(client.generate([1, *bare.ids], Params()))
        without = await answer(client.generate(bare.ids, Params()))
        assert expected.token_ids != without.token_ids
        for given in (text, f"<|im_start|>{text}"):
            request = pb.GenerateRequest(text=given, sampling_params=sampling(Params()))
            found = await answer(client.send(request))
            assert found.end.prompt_tokens == 1 + len(bare.ids)
            assert found.token_ids == expected.token_ids
        empty = await failure(answer(client.send(pb.GenerateRequest(text=""))))
        assert empty.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert (empty.details() or "").startswith("text")


async def test_an_end_that_only_the_generation_config_names_ends_the_turn(
    models: Models, connect: Connect, tmp_path: Path
) -> None:
    (free,) = references(models("plain"), [IDS], 12)
    end = free.ids[7]
    assert end not in free.ids[:7]
    model = like(models("plain"), tmp_path / "model")
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, end]}))
    driver = MlxDriver(str(model))
    with start(driver) as worker:
        worker.until_serving(driver.boot_seconds)
        assert list((await model_info(connect, worker)).eos_token_ids) == sorted([2, end])
        client = connect(worker)
        params = Params(max_tokens=12, ignore_eos=False)
        ended = await answer(client.generate(IDS, params))
        assert ended.token_ids == free.ids[:8]
        assert (ended.reason, ended.end.matched) == ("stop", end)
        whole = await answer(client.generate(IDS, Params(max_tokens=12)))
        free.check(whole.token_ids)

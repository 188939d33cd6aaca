"""What MLX's wire carries and no other does."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from smg_grpc_proto.generated import mlx_engine_pb2 as pb
from smg_grpc_proto.generated import mlx_engine_pb2_grpc
from tests.conformance.driver import Params
from tests.conformance.reading import answer, begun, failure, idle
from tests.conformance.suite.ends import LONG, end_of
from tests.lanes.mlx.driver import PROMPTS
from tests.lanes.mlx.library import references
from tests.lanes.mlx.wire import sampling

if TYPE_CHECKING:
    from tests.conformance.fixtures import Connect
    from tests.lanes.mlx.conftest import Models
    from tests.lanes.mlx.driver import MlxDriver
    from tests.lanes.mlx.wire import MlxClient
    from tests.support.processes import Process

pytestmark = pytest.mark.engine


@pytest.fixture
def stub(connect: Connect, worker: Process) -> Any:
    return mlx_engine_pb2_grpc.MlxEngineStub(connect.channel(worker))


@pytest.mark.parametrize("stream", [True, False])
async def test_a_text_is_answered_as_its_tokens_are(
    client: MlxClient, driver: MlxDriver, stream: bool
) -> None:
    for text, ids in zip(PROMPTS, driver.facts.prompts, strict=True):
        of_ids = await answer(client.generate(ids, Params(), stream=stream))
        request = pb.GenerateRequest(text=text, sampling_params=sampling(Params()), stream=stream)
        of_text = await answer(client.send(request))
        assert of_text.token_ids == of_ids.token_ids
        assert of_text.end.prompt_tokens == len(ids)


async def test_an_empty_text_and_one_beyond_the_context_are_refused_by_name(
    client: MlxClient, driver: MlxDriver
) -> None:
    too_long = "word " * (driver.facts.context + 10)
    for text in ("", too_long):
        error = await failure(answer(client.send(pb.GenerateRequest(text=text))))
        assert error.code().name == "INVALID_ARGUMENT"
        assert (error.details() or "").startswith("text")


async def test_a_top_k_beyond_the_vocabulary_leaves_nothing_out(
    client: MlxClient, driver: MlxDriver
) -> None:
    prompt, params = driver.facts.prompts[0], {"temperature": 1.0, "seed": 3}
    off = await answer(client.generate(prompt, Params(**params)))
    for top_k in (driver.facts.vocabulary, 2**31 - 1, 2**32 - 1):
        found = await answer(client.generate(prompt, Params(**params, top_k=top_k)))
        assert found.token_ids == off.token_ids


@pytest.mark.slow
async def test_greedy_is_the_library_s_own_alone_and_among_fifteen_others(
    client: MlxClient, driver: MlxDriver, models: Models
) -> None:
    prompt, params = driver.facts.prompts[0], Params(max_tokens=32)
    (expected,) = references(models.demo, [prompt], 32)
    assert len(expected.ids) == 32
    expected.check((await answer(client.generate(prompt, params))).token_ids)
    others = []
    for n in range(15):
        company = driver.facts.prompts[n % 4][n % 3 :] * (1 + n % 3)
        sampled = {} if n % 2 else {"temperature": 1.0, "top_p": 0.9, "presence_penalty": 0.5}
        others.append(client.generate(company, Params(max_tokens=4 + 2 * n, **sampled)))
    watched, *rest = await asyncio.gather(
        answer(client.generate(prompt, params)), *map(answer, others)
    )
    expected.check(watched.token_ids)
    assert [len(other.token_ids) for other in rest] == [4 + 2 * n for n in range(15)]


async def test_a_prompt_that_was_just_read_is_not_read_again(
    client: MlxClient, driver: MlxDriver
) -> None:
    prompt = [*driver.facts.prompts[2], *driver.facts.prompts[3]] * 20
    prompt = prompt[-400:]
    assert len(prompt) == 400
    first = await answer(client.generate(prompt, Params()))
    second = await answer(client.generate(prompt, Params()))
    assert first.end.cached_tokens < 100
    assert 384 <= second.end.cached_tokens < 400
    assert second.token_ids == first.token_ids
    turn = [*prompt, *first.token_ids, *driver.facts.prompts[1]]
    third = await answer(client.generate(turn, Params()))
    assert third.end.cached_tokens >= 400


async def test_one_abort_ends_many_requests_and_no_others(
    client: MlxClient, driver: MlxDriver, stub: Any
) -> None:
    names = ["many-1", "many-2", "kept"]
    calls = [client.generate(driver.facts.prompts[0], LONG, request_id=name) for name in names]
    for call in calls:
        await begun(call)
    await stub.Abort(pb.AbortRequest(request_ids=["unknown", "many-1", "many-1", "many-2"]))
    ends = [(await end_of(call)).finish_reason for call in calls[:2]]
    assert ends == ["abort", "abort"]
    assert await client.active() == 1
    await stub.Abort(pb.AbortRequest())
    assert await client.active() == 1
    calls[2].cancel()
    await idle(client, driver.settle_seconds)


async def test_the_model_describes_itself(stub: Any, driver: MlxDriver) -> None:
    info = await stub.GetModelInfo(pb.GetModelInfoRequest())
    facts = driver.facts
    assert info.vocab_size == facts.vocabulary
    assert info.max_context_length == facts.context
    assert info.max_req_input_len == facts.context - 1
    assert facts.end_of_sequence in info.eos_token_ids
    assert info.is_generation
    assert list(info.architectures)
    server = await stub.GetServerInfo(pb.GetServerInfoRequest())
    assert server.server_type == "mlx-grpc"
    assert server.uptime_seconds > 0

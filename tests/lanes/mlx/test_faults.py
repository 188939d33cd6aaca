"""What only MLX's engine can suffer, as its clients and its supervisor see it."""

from __future__ import annotations

import asyncio
import signal
from typing import TYPE_CHECKING

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tests.conformance.driver import Params
from tests.conformance.fixtures import start
from tests.conformance.reading import answer, begun, failure
from tests.conformance.suite.ends import LONG, end_of

if TYPE_CHECKING:
    from tests.conformance.fixtures import Connect
    from tests.lanes.mlx.driver import MlxDriver

pytestmark = pytest.mark.engine


async def test_a_thread_that_is_stuck_is_noticed_fails_all_and_ends_the_process(
    driver: MlxDriver, connect: Connect
) -> None:
    with start(driver, "--stall-timeout", "2", breakable=True) as worker:
        worker.until_serving(driver.boot_seconds)
        client = connect(worker)
        streams = [client.generate(prompt, LONG) for prompt in driver.facts.prompts[:2]]
        for stream in streams:
            await begun(stream)
        watch = health_pb2_grpc.HealthStub(connect.channel(worker)).Watch(
            health_pb2.HealthCheckRequest()
        )
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        worker.signal(signal.SIGUSR2)
        for stream in streams:
            error = await failure(asyncio.wait_for(end_of(stream), 60))
            assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        watch.cancel()
        # The thread never returns; the process must not wait for it for ever.
        assert await asyncio.to_thread(worker.wait, 30) == 1
        assert "no step in" in worker.output


async def test_a_stuck_thread_does_not_hold_a_second_sigterm(
    driver: MlxDriver, connect: Connect
) -> None:
    with start(driver, breakable=True) as worker:
        worker.until_serving(driver.boot_seconds)
        stream = connect(worker).generate(driver.facts.prompts[0], LONG)
        await begun(stream)
        worker.signal(signal.SIGUSR2)
        worker.signal(signal.SIGTERM)
        worker.until_logged("draining 1 requests")
        worker.signal(signal.SIGTERM)
        assert await asyncio.to_thread(worker.wait, 10) == 143
        assert (await failure(end_of(stream))).code() is grpc.StatusCode.UNAVAILABLE


async def test_an_idle_worker_never_stalls(driver: MlxDriver, connect: Connect) -> None:
    with start(driver, "--stall-timeout", "0.5") as worker:
        worker.until_serving(driver.boot_seconds)
        await asyncio.sleep(2)
        found = await answer(connect(worker).generate(driver.facts.prompts[0], Params()))
        assert found.reason == "length"
        worker.signal()
        assert await asyncio.to_thread(worker.wait, 20) == 0


def test_a_model_that_is_not_there_exits_3_with_its_name(driver: MlxDriver) -> None:
    with start(driver, "--model", "/no/such/model") as worker:
        assert worker.wait(driver.boot_seconds) == 3
        assert "/no/such/model" in worker.output.splitlines()[-1]
        assert "Traceback" not in worker.output

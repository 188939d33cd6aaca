"""A worker's whole life: each test boots its own."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tests.conformance.driver import Params
from tests.conformance.fixtures import start
from tests.conformance.reading import PATIENCE, answer, begun, eventually, failure, idle
from tests.conformance.suite.ends import LONG, end_of
from tests.support.certificates import Authority, write_pair
from tests.support.processes import Process

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conformance.driver import Driver, Facts
    from tests.conformance.fixtures import Connect

Code = grpc.StatusCode
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class TestLife:
    async def test_health_shows_every_station_from_start_to_end(
        self, driver: Driver, connect: Connect, facts: Facts
    ) -> None:
        with start(driver) as worker:
            # Connected as soon as it listens, or its first state would be missed.
            eager = [
                ("grpc.initial_reconnect_backoff_ms", 50),
                ("grpc.min_reconnect_backoff_ms", 50),
                ("grpc.max_reconnect_backoff_ms", 100),
            ]
            stub = health_pb2_grpc.HealthStub(connect.channel(worker, *eager))
            watches = [
                stub.Watch(health_pb2.HealthCheckRequest(service=service), wait_for_ready=True)
                for service in ("", driver.service)
            ]
            for watch in watches:
                first = await asyncio.wait_for(watch.read(), driver.boot_seconds)
                assert first.status == NOT_SERVING
            # Not yet: refused at once, and not left to wait for the model.
            impatient = connect(worker, *eager).generate(facts.prompts[0], Params())
            early = await failure(answer(impatient))
            assert early.code() is Code.UNAVAILABLE
            for watch in watches:
                second = await asyncio.wait_for(watch.read(), driver.boot_seconds)
                assert second.status == SERVING
            client = connect(worker)
            running = client.generate(facts.prompts[0], Params(max_tokens=64))
            await begun(running)
            worker.signal()
            began = time.monotonic()
            for watch in watches:
                assert (await asyncio.wait_for(watch.read(), 5)).status == NOT_SERVING
            assert time.monotonic() - began < 2
            late = await failure(answer(client.generate(facts.prompts[0], Params())))
            assert late.code() is Code.UNAVAILABLE
            end = await asyncio.wait_for(end_of(running), PATIENCE)
            assert (end.finish_reason, end.completion_tokens) == ("length", 64)
            assert await asyncio.to_thread(worker.wait, 20) == 0

    async def test_a_drain_that_takes_too_long_ends_its_streams(
        self, driver: Driver, connect: Connect, facts: Facts
    ) -> None:
        with start(driver, "--drain-timeout", "0.5") as worker:
            worker.until_serving(driver.boot_seconds)
            call = connect(worker).generate(facts.prompts[0], LONG)
            await begun(call)
            worker.signal()
            assert (await failure(end_of(call))).code() is Code.UNAVAILABLE
            assert await asyncio.to_thread(worker.wait, 20) == 0

    @pytest.mark.slow
    async def test_a_drain_lasts_for_as_long_as_its_streams_need(
        self, driver: Driver, connect: Connect, facts: Facts
    ) -> None:
        with start(driver, "--drain-timeout", "300") as worker:
            worker.until_serving(driver.boot_seconds)
            client = connect(worker)
            calls = [client.generate(prompt, Params(max_tokens=400)) for prompt in facts.prompts]
            for call in calls:
                await begun(call)
            worker.signal()
            for call in calls:
                end = await asyncio.wait_for(end_of(call), 280)
                assert (end.finish_reason, end.completion_tokens) == ("length", 400)
            assert await asyncio.to_thread(worker.wait, 20) == 0

    def test_sigterm_while_it_starts_exits_0_promptly(self, driver: Driver) -> None:
        with start(driver) as worker:
            _listening(worker, driver)
            worker.signal()
            assert worker.wait(15) == 0

    def test_a_second_worker_on_the_port_refuses_to_start(
        self, driver: Driver, worker: Process
    ) -> None:
        second = Process(command=driver.command(), env=driver.environment(), port=worker.port)
        with second:
            assert second.wait(driver.boot_seconds) == 3
            assert f"127.0.0.1:{worker.port}" in second.output.splitlines()[-1]
        worker.until_serving(5)

    async def test_an_engine_that_is_killed_fails_all_and_ends_the_process(
        self, driver: Driver, connect: Connect, facts: Facts
    ) -> None:
        with start(driver, breakable=True) as worker:
            worker.until_serving(driver.boot_seconds)
            client = connect(worker)
            calls = [client.generate(prompt, LONG) for prompt in facts.prompts]
            for call in calls:
                await begun(call)
            unary = asyncio.ensure_future(
                failure(answer(client.generate(facts.prompts[0], LONG, stream=False)))
            )

            async def all_active() -> bool:
                return await client.active() == len(calls) + 1

            await eventually(all_active, driver.settle_seconds, "every request active")
            stub = health_pb2_grpc.HealthStub(connect.channel(worker))
            watch = stub.Watch(health_pb2.HealthCheckRequest())
            assert (await watch.read()).status == SERVING
            driver.break_engine(worker)
            for call in calls:
                error = await failure(asyncio.wait_for(end_of(call), driver.settle_seconds))
                assert error.code() is Code.UNAVAILABLE
            assert (await asyncio.wait_for(unary, driver.settle_seconds)).code() is Code.UNAVAILABLE
            assert (await asyncio.wait_for(watch.read(), 5)).status == NOT_SERVING
            watch.cancel()
            assert await asyncio.to_thread(worker.wait, 20) == 1

    async def test_a_full_queue_is_refused_before_the_engine_and_empties_again(
        self, driver: Driver, connect: Connect, facts: Facts
    ) -> None:
        with start(driver, *driver.slots(2), "--max-queued-requests", "1") as worker:
            worker.until_serving(driver.boot_seconds)
            client = connect(worker)
            alone = await answer(client.generate(facts.prompts[1], Params()))
            held = [client.generate(facts.prompts[0], LONG, request_id=f"h{n}") for n in range(3)]
            for call in held[:2]:
                await begun(call)

            async def three_active() -> bool:
                return await client.active() == 3

            await eventually(three_active, driver.settle_seconds, "three requests active")
            for stream in (True, False):
                call = client.generate(facts.prompts[1], Params(), stream=stream)
                error = await failure(answer(call))
                assert error.code() is Code.RESOURCE_EXHAUSTED
                assert "--max-queued-requests 1" in (error.details() or "")
            # The one that waits has its turn when another leaves.
            await client.abort("h0")
            await begun(held[2])
            for call in held:
                call.cancel()
            await idle(client, driver.settle_seconds)
            again = await answer(client.generate(facts.prompts[1], Params()))
            assert again.token_ids == alone.token_ids

    async def test_a_key_is_enforced_and_tls_is_served(
        self, driver: Driver, connect: Connect, facts: Facts, tmp_path: Path
    ) -> None:
        authority = Authority("ours")
        certificate, key = write_pair(tmp_path, authority.issue("worker"))
        options = ("--ssl-certfile", certificate, "--ssl-keyfile", key)
        credentials = grpc.ssl_channel_credentials(authority.pem)
        worker = Process(
            *options,
            command=driver.command(),
            env={**driver.environment(), "SMG_API_KEY": "swordfish"},
        )
        with worker:
            channel = connect.channel(worker, credentials=credentials)
            # Probes need no key.
            watch = health_pb2_grpc.HealthStub(channel).Watch(
                health_pb2.HealthCheckRequest(), wait_for_ready=True
            )
            while (await asyncio.wait_for(watch.read(), driver.boot_seconds)).status != SERVING:
                pass
            watch.cancel()
            right = driver.client(channel, (("authorization", "Bearer swordfish"),))
            assert (await answer(right.generate(facts.prompts[0], Params()))).reason == "length"
            for metadata in ((), (("authorization", "Bearer sword"),)):
                wrong = driver.client(channel, metadata)
                error = await failure(answer(wrong.generate(facts.prompts[0], Params())))
                assert error.code() is Code.UNAUTHENTICATED
                assert (await failure(wrong.served_model_name())).code() is Code.UNAUTHENTICATED
                assert (await failure(wrong.tokenizer())).code() is Code.UNAUTHENTICATED
                assert (await failure(wrong.abort("x"))).code() is Code.UNAUTHENTICATED
            plain = connect(worker)
            assert (await failure(plain.active())).code() is Code.UNAVAILABLE
            assert "swordfish" not in worker.output
            worker.signal()
            assert await asyncio.to_thread(worker.wait, 20) == 0

    @pytest.mark.parametrize("option", [("--port", "70000"), ("--no-such-option", "1")])
    def test_a_wrong_option_exits_2_with_one_line(
        self, driver: Driver, option: tuple[str, str]
    ) -> None:
        with start(driver, *option) as worker:
            assert worker.wait(driver.boot_seconds) == 2
            (line,) = worker.output.splitlines()
            assert option[0] in line


def _listening(worker: Process, driver: Driver) -> None:
    with grpc.insecure_channel(worker.address) as channel:
        grpc.channel_ready_future(channel).result(driver.boot_seconds)

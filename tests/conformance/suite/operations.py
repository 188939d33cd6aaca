"""What those who operate a worker rely on."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from tests.conformance.driver import Params
from tests.conformance.reading import answer, eventually, failure
from tests.support.processes import scrape

if TYPE_CHECKING:
    from tests.conformance.driver import Client, Driver, Facts
    from tests.conformance.fixtures import Connect, Lane
    from tests.support.processes import Process

SERVING = health_pb2.HealthCheckResponse.SERVING


def _value(text: str, sample: str) -> float:
    for line in text.splitlines():
        if line.startswith(f"{sample} "):
            return float(line.rsplit(" ", 1)[1])
    return 0.0


class TestOperations:
    async def test_health_answers_for_the_server_and_for_the_service(
        self, connect: Connect, worker: Process, driver: Driver, client: Client
    ) -> None:
        stub = health_pb2_grpc.HealthStub(connect.channel(worker))
        for service in ("", driver.service):
            answered = await stub.Check(health_pb2.HealthCheckRequest(service=service))
            assert answered.status == SERVING
            watch = stub.Watch(health_pb2.HealthCheckRequest(service=service))
            assert (await watch.read()).status == SERVING
            watch.cancel()
        error = await failure(stub.Check(health_pb2.HealthCheckRequest(service="no.Such")))
        assert error.code() is grpc.StatusCode.NOT_FOUND
        watch = stub.Watch(health_pb2.HealthCheckRequest(service="no.Such"))
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
        watch.cancel()
        assert await client.healthy()

    async def test_reflection_lists_the_service_and_describes_it(
        self, connect: Connect, worker: Process, driver: Driver
    ) -> None:
        stub = reflection_pb2_grpc.ServerReflectionStub(connect.channel(worker))
        requests = [
            reflection_pb2.ServerReflectionRequest(list_services=""),
            reflection_pb2.ServerReflectionRequest(file_containing_symbol=driver.service),
        ]
        listed, described = [a async for a in stub.ServerReflectionInfo(iter(requests))]
        names = {service.name for service in listed.list_services_response.service}
        assert {driver.service, "grpc.health.v1.Health"} <= names
        assert len(described.file_descriptor_response.file_descriptor_proto) > 0

    async def test_the_model_is_known_by_its_served_name(
        self, client: Client, driver: Driver
    ) -> None:
        assert await client.served_model_name() == driver.served_model_name

    async def test_metrics_count_what_was_served(
        self, client: Client, facts: Facts, lane: Lane, driver: Driver
    ) -> None:
        async def text() -> str:
            return await asyncio.to_thread(scrape, lane.metrics_port)

        ended = 'smg_worker_requests_total{finish_reason="length"}'
        refused = 'smg_worker_refusals_total{code="INVALID_ARGUMENT"}'
        before = await text()
        await answer(client.generate(facts.prompts[0], Params(max_tokens=5)))
        await failure(answer(client.send(driver.refusals()[0].request)))

        async def counted() -> bool:
            after = await text()
            return all(_value(after, s) == _value(before, s) + 1 for s in (ended, refused))

        await eventually(counted, driver.settle_seconds, f"{ended} and {refused} grow by one")
        after = await text()
        grown = {
            "prompt_tokens_total": len(facts.prompts[0]),
            "generation_tokens_total": 5,
            "time_to_first_token_seconds_count": 1,
            "request_duration_seconds_count": 1,
        }
        for name, growth in grown.items():
            sample = f"smg_worker_{name}"
            assert _value(after, sample) - _value(before, sample) == growth, sample
        assert _value(after, "smg_worker_inter_token_latency_seconds_count") > _value(
            before, "smg_worker_inter_token_latency_seconds_count"
        )
        assert "smg_worker_cached_tokens_total" in after
        assert _value(after, "smg_worker_requests_in_flight") == 0
        assert 'smg_worker_state{state="serving"} 1.0' in after
        labels = f'engine="{driver.name}",model_name="{driver.served_model_name}"'
        assert f"smg_worker_info{{{labels}}} 1.0" in after

    async def test_five_megabytes_are_no_transport_error(
        self, connect: Connect, worker: Process, facts: Facts
    ) -> None:
        unlimited = connect(worker, ("grpc.max_send_message_length", -1))
        prompt = [facts.prompts[0][0]] * 5_000_000
        error = await failure(answer(unlimited.generate(prompt, Params())))
        # It arrived: what refuses it is the context, with both lengths.
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "5000000" in (error.details() or "")
        assert str(facts.context) in (error.details() or "")

    async def test_bytes_that_are_no_message_are_the_callers_fault(
        self, connect: Connect, worker: Process, driver: Driver
    ) -> None:
        call = connect.channel(worker).unary_stream(f"/{driver.service}/Generate")

        async def read() -> None:
            async for _ in call(b"\xff\xff\xff"):
                pass

        assert (await failure(read())).code() is grpc.StatusCode.INVALID_ARGUMENT

    @pytest.mark.slow
    async def test_a_client_may_ping_every_second(
        self, connect: Connect, worker: Process, facts: Facts
    ) -> None:
        pinging = connect(
            worker,
            ("grpc.keepalive_time_ms", 1000),
            ("grpc.keepalive_timeout_ms", 5000),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.max_pings_without_data", 0),
        )
        await answer(pinging.generate(facts.prompts[0], Params()))
        # No call and no data: nothing but pings. A server that strikes hangs up by now.
        await asyncio.sleep(8)
        found = await answer(pinging.generate(facts.prompts[0], Params()))
        assert found.reason == "length"

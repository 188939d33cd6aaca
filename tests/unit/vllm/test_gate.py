from __future__ import annotations

from typing import Any

import grpc
import pytest
from smg_grpc_proto.generated import common_pb2, vllm_engine_pb2_grpc
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from smg_grpc_servicer.serving.health import Health, State
from smg_grpc_servicer.serving.interceptors import Guard, GuardInterceptor
from smg_grpc_servicer.vllm.gate import Gate
from smg_wire.observability import WorkerMetrics


class Servicer:
    async def Generate(self, request: Any, context: Any) -> None:
        await context.write(pb.GenerateResponse(complete=pb.GenerateComplete(output_ids=[1])))

    async def GetTokenizer(self, request: Any, context: Any) -> Any:
        yield common_pb2.GetTokenizerChunk(data=b"zip")

    async def GetModelInfo(self, request: Any, context: Any) -> pb.GetModelInfoResponse:
        return pb.GetModelInfoResponse(vocab_size=7)


async def test_rpcs_are_refused_until_there_is_a_servicer_and_then_passed_on() -> None:
    health = Health()
    gate = Gate(health)
    guard = Guard(metrics=WorkerMetrics("fake"))
    server = grpc.aio.server(interceptors=[GuardInterceptor(guard)])
    vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(gate, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)
            for call in (
                stub.GetModelInfo(pb.GetModelInfoRequest()),
                stub.Generate(pb.GenerateRequest()).read(),
            ):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await call
                assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
                assert "starting" in (caught.value.details() or "")
            gate.open(Servicer())
            health.to(State.SERVING)
            assert (await stub.GetModelInfo(pb.GetModelInfoRequest())).vocab_size == 7
            answer = await stub.Generate(pb.GenerateRequest()).read()
            assert list(answer.complete.output_ids) == [1]
            chunk = await stub.GetTokenizer(common_pb2.GetTokenizerRequest()).read()
            assert chunk.data == b"zip"
    finally:
        await server.stop(None)

"""What the tests ask of the worker, over the wire."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import grpc
from smg_grpc_proto.generated import common_pb2, vllm_engine_pb2_grpc
from smg_grpc_proto.generated import vllm_engine_pb2 as pb
from tests.unit.kv_events.cache import Subscriber

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

    from typing_extensions import Self


async def until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    for _ in range(int(seconds / 0.02)):
        if condition():
            return
        await asyncio.sleep(0.02)
    raise AssertionError("not in time")


class Client:
    """A channel to the worker; leaving the block closes it."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.aio.insecure_channel(address)
        self.stub = vllm_engine_pb2_grpc.VllmEngineStub(self._channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._channel.close()

    async def generate(self, ids: Sequence[int], tokens: int) -> list[int]:
        """Return the greedy answer's ids, of exactly that length."""
        request = pb.GenerateRequest(
            tokenized=pb.TokenizedInput(input_ids=ids),
            sampling_params=pb.SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True),
            stream=True,
        )
        answer: list[int] = []
        async for response in self.stub.Generate(request):
            answer += response.chunk.token_ids
        return answer

    async def flush(self) -> bool:
        response = await self.stub.FlushCache(common_pb2.FlushCacheRequest())
        return bool(response.success)

    async def loads(self, **request: object) -> pb.GetLoadsResponse:
        response: pb.GetLoadsResponse = await self.stub.GetLoads(pb.GetLoadsRequest(**request))
        return response


class Stream:
    """A subscription read by a task; leaving the block cancels it."""

    def __init__(self, client: Client, start: int = 0, *, records_first: bool = False) -> None:
        request = common_pb2.SubscribeKvEventsRequest(
            start_sequence_number=start, load_records_before_first_batch=records_first
        )
        self.subscriber = Subscriber()
        self.batches: list[common_pb2.KvEventBatch] = []
        self._call = client.stub.SubscribeKvEvents(request)
        self.task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for batch in self._call:
            self.batches.append(batch)
            self.subscriber.take(batch)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._call.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        if error is None and self.task.done() and not self.task.cancelled():
            # What the subscriber found wrong while it read.
            failure = self.task.exception()
            if failure is not None and not isinstance(failure, grpc.aio.AioRpcError):
                raise failure

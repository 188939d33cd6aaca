"""The RPCs that tell a router how the engine is: GetLoads and SubscribeKvEvents."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from smg_grpc_servicer.vllm.loads import loads_response

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import grpc
    from smg_grpc_proto.generated import common_pb2
    from smg_grpc_proto.generated import vllm_engine_pb2 as pb

    from smg_grpc_servicer.loads import LoadBoard
    from smg_grpc_servicer.vllm.events import KvEvents

    Context = grpc.aio.ServicerContext[Any, Any]


@cache
def vllm_version() -> str:
    """Return the release of the vLLM that is installed."""
    import vllm

    return str(vllm.__version__)


class TelemetryMethods:
    """Mixed into the servicer, which sets both attributes."""

    _loads: LoadBoard
    _kv_events: KvEvents

    async def GetLoads(self, request: pb.GetLoadsRequest, context: Context) -> pb.GetLoadsResponse:
        """Answer the loads of the ranks managed here."""
        del context
        return loads_response(request, self._loads, vllm_version())

    async def SubscribeKvEvents(
        self, request: common_pb2.SubscribeKvEventsRequest, context: Context
    ) -> AsyncIterator[common_pb2.KvEventBatch]:
        """Stream the KV events of all ranks, with load records, until the client leaves."""
        del context
        batches = self._kv_events.subscribe(request)
        try:
            async for batch in batches:
                yield batch
        finally:
            # At once, and not when the garbage collector finds the inner generator.
            await batches.aclose()  # type: ignore[attr-defined]

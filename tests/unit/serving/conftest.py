from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import pytest_asyncio

from smg_grpc_servicer.serving.health import Health
from smg_grpc_servicer.serving.server import bind, build_server
from smg_grpc_servicer.settings import ServingSettings
from smg_wire.observability import WorkerMetrics

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence


class Bench:
    """Starts servers on free ports, and channels to them; all end with the test."""

    def __init__(self, owned: AsyncExitStack) -> None:
        self._owned = owned
        self.health = Health()
        self.metrics = WorkerMetrics("fake")
        self.address = ""

    async def serve(
        self,
        register: Callable[[grpc.aio.Server], None] = lambda _: None,
        services: Sequence[str] = (),
        **settings: Any,
    ) -> grpc.aio.Channel:
        """Start a server and return a channel to it."""
        values = ServingSettings(**{"port": 0, **settings})
        server = build_server(
            values,
            health=self.health,
            metrics=self.metrics,
            services=services,
            register=register,
        )
        port = bind(server, values)
        await server.start()
        self._owned.push_async_callback(server.stop, None)
        self.address = f"{values.host}:{port}"
        return self.channel()

    def channel(self, *options: tuple[str, Any]) -> grpc.aio.Channel:
        channel = grpc.aio.insecure_channel(self.address, options=options)
        self._owned.push_async_callback(channel.close)
        return channel

    async def counted(self, name: str, value: float, **labels: str) -> None:
        """Wait for a value: an RPC is counted when its status is out, which a client sees first."""
        for _ in range(200):
            if self.sample(name, **labels) >= value:
                break
            await asyncio.sleep(0.01)
        assert self.sample(name, **labels) == value

    def sample(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(f"smg_worker_{name}", labels) or 0.0


@pytest_asyncio.fixture
async def bench() -> AsyncIterator[Bench]:
    async with AsyncExitStack() as owned:
        yield Bench(owned)


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))

"""The fixtures behind the suite; a lane imports them in its conftest and adds its `driver`."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

import grpc
import pytest
import pytest_asyncio
from tests.support.processes import Process, free_port

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from tests.conformance.driver import Client, Driver, Facts, Metadata


class Lane:
    """A running worker and what may be asked of it."""

    def __init__(self, driver: Driver, worker: Process, metrics_port: int) -> None:
        self.driver = driver
        self.worker = worker
        self.metrics_port = metrics_port


class Connect:
    """Opens channels, all of which end with the test."""

    def __init__(self, driver: Driver, owned: AsyncExitStack) -> None:
        self._driver = driver
        self._owned = owned

    def channel(
        self,
        worker: Process,
        *options: tuple[str, int],
        credentials: grpc.ChannelCredentials | None = None,
    ) -> grpc.aio.Channel:
        if credentials is None:
            channel = grpc.aio.insecure_channel(worker.address, options=options)
        else:
            channel = grpc.aio.secure_channel(worker.address, credentials, options=options)
        self._owned.push_async_callback(channel.close)
        return channel

    def __call__(
        self, worker: Process, *options: tuple[str, int], metadata: Metadata = ()
    ) -> Client:
        return self._driver.client(self.channel(worker, *options), metadata)


@pytest.fixture(scope="session")
def lane(driver: Driver) -> Iterator[Lane]:
    """The worker that the tests of a session share."""
    port = free_port()
    with start(driver, "--metrics-port", str(port)) as worker:
        worker.until_serving(driver.boot_seconds)
        yield Lane(driver, worker, port)
        # It must have lived through all of it, and must be able to stop.
        worker.signal()
        assert worker.wait(driver.boot_seconds) == 0


def start(driver: Driver, *options: str, breakable: bool = False) -> Process:
    """Start a worker of its own for one test."""
    return Process(
        *options,
        command=driver.breakable_command() if breakable else driver.command(),
        env=driver.environment(),
    )


@pytest.fixture
def worker(lane: Lane) -> Process:
    return lane.worker


@pytest.fixture
def facts(driver: Driver) -> Facts:
    return driver.facts


@pytest_asyncio.fixture
async def connect(driver: Driver) -> AsyncIterator[Connect]:
    async with AsyncExitStack() as owned:
        yield Connect(driver, owned)


@pytest_asyncio.fixture
async def client(connect: Connect, worker: Process) -> Client:
    return connect(worker)

"""Links: both ways, in order, and an end for everything that is silent, gone or out of reach."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from distributed.comm import connect
from distributed.core import Server, Status
from distributed.protocol import to_serialize

from daskserve.config import settings
from daskserve.service.link import Link


class Echo(Server):
    """Answers every message with itself, until it is told to be silent."""

    def __init__(self, silence_s: float) -> None:
        super().__init__({"echo": self.echo})
        self.silence_s = silence_s
        self.link: Link | None = None
        self.num_ended = 0

    async def echo(self, comm) -> Status:
        self.link = Link(self.silence_s)
        await self.link.talk(comm, self.link.send)
        self.num_ended += 1
        return Status.dont_reply


@pytest.fixture
async def start() -> AsyncIterator[Callable[..., Any]]:
    """``await start(silence_s)``: a server."""
    servers = []

    async def make(silence_s: float = 5.0) -> Echo:
        server = Echo(silence_s)
        await server
        await server.listen(f"{settings().service.protocol}://127.0.0.1:0")
        servers.append(server)
        return server

    yield make
    for server in servers:
        await server.close()


def dial(link: Link, address: str, got: list, timeout_s: float = 2.0) -> asyncio.Task:
    return asyncio.create_task(link.dial(address, "echo", got.append, timeout_s, {}))


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.005)


async def test_messages_come_back_in_order_those_sent_before_it_stood_too(start):
    server = await start()
    link, got = Link(5.0), []
    link.send({"op": "x", "n": 0})
    task = dial(link, server.address, got)
    for number in range(1, 500):
        link.send({"op": "x", "n": number})
    await until(lambda: len(got) == 500)
    assert [message["n"] for message in got] == list(range(500))
    link.cut()
    await task
    await until(lambda: server.num_ended == 1)


async def test_an_idle_link_lives_on(start):
    server = await start(0.2)
    link = Link(0.2)
    task = dial(link, server.address, [])
    await asyncio.sleep(0.7)
    assert not link.is_over and server.num_ended == 0
    link.cut()
    await task


async def test_a_silent_end_is_given_up(start):
    server = await start(30.0)  # its signs of life are too far apart
    link = Link(0.2)
    await asyncio.wait_for(dial(link, server.address, []), 2)
    assert link.is_over
    link.send({"op": "x"})  # goes nowhere, and raises nothing


async def test_a_server_that_closes_ends_it(start):
    server = await start()
    link = Link(5.0)
    task = dial(link, server.address, [])
    await until(lambda: server.link is not None)
    await server.close()
    await asyncio.wait_for(task, 2)
    assert link.is_over


async def test_whoever_is_not_there_is_given_up_in_time():
    link = Link(5.0)
    await asyncio.wait_for(dial(link, "tcp://127.0.0.1:9", [], timeout_s=0.2), 2)
    assert link.is_over


async def test_an_end_that_reads_nothing_is_cut(start, monkeypatch):
    monkeypatch.setattr("daskserve.service.link._MAX_PENDING", 10)
    link = Link(5.0)
    for number in range(11):
        link.send({"op": "x", "n": number})
    assert link.is_over


class Harmful:
    """Whoever unpickles it calls what it names."""

    calls: list[str] = []

    def __reduce__(self) -> tuple[Any, ...]:
        return Harmful.calls.append, ("unpickled",)


async def test_what_is_pickled_is_not_read(start):
    server = await start()
    comm = await connect(server.address)
    await comm.write({"op": "echo", "reply": False})
    await comm.write([to_serialize(Harmful())], serializers=["pickle"])
    await until(lambda: server.num_ended == 1)
    assert Harmful.calls == []
    await comm.close()

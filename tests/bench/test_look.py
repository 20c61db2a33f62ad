"""What is said of servers that cannot be measured, and what is learnt of those that can."""

from __future__ import annotations

import asyncio
import json

import pytest

from daskserve.bench.look import NoServer, looked_at
from daskserve.bench.target import Target


def answering(*bodies, status=200):
    """The bodies in turn, the last one for ever."""
    left = [body if isinstance(body, str) else json.dumps(body) for body in bodies]

    async def answer(reader, writer):
        body = left.pop(0) if len(left) > 1 else left[0]
        head = f"HTTP/1.1 {status} X\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write((head + body).encode())

    return answer


MODELS = {"data": [{"id": "a", "owned_by": "vllm"}]}


async def test_the_only_model_is_taken_and_others_tell_no_timelines(scripted):
    async with scripted(answering(MODELS)) as url:
        target, num_instances = await looked_at(Target(f"{url}/v1/", ""), 0)
    assert (target.model, target.has_timelines, num_instances) == ("a", False, None)


async def test_our_own_server_tells_timelines_and_instances(scripted):
    ours = {"data": [{"id": "m", "owned_by": "daskserve"}]}
    ready = {"roles": {"prefill": {"ready": 2}, "decode": {"ready": 3}}}
    async with scripted(answering(ours, ready)) as url:
        target, num_instances = await looked_at(Target(url, "m"), 0)
    assert (target.has_timelines, num_instances) == (True, 5)


async def test_of_several_models_one_must_be_named(scripted):
    several = {"data": [{"id": "a"}, {"id": "b"}]}
    async with scripted(answering(several)) as url:
        with pytest.raises(NoServer, match="give --model; the server has a, b"):
            await looked_at(Target(url, ""), 0)


async def test_a_server_without_a_list_is_taken_at_its_word(scripted):
    async with scripted(answering({}, status=404)) as url:
        target, _ = await looked_at(Target(url, "m"), 0)
        assert target.model == "m"
        with pytest.raises(NoServer, match="404"):
            await looked_at(Target(url, ""), 0)


@pytest.mark.parametrize("body", ["<html>", [], {"data": None}, {"data": [1]}, "null"])
async def test_another_kind_of_server_is_named(scripted, body):
    async with scripted(answering(body)) as url:
        with pytest.raises(NoServer, match="bad answer.*OpenAI"):
            await looked_at(Target(url, "m"), 0)


async def test_a_server_that_starts_is_waited_for(scripted):
    loading = asyncio.Event()

    async def answer(reader, writer):
        if loading.is_set():
            await answering(MODELS)(reader, writer)
        else:
            await answering({}, status=503)(reader, writer)

    async with scripted(answer) as url:
        with pytest.raises(NoServer, match="503.*--ready-timeout"):
            await looked_at(Target(url, "a"), 0)
        asyncio.get_running_loop().call_later(0.2, loading.set)
        assert (await looked_at(Target(url, "a"), 10))[0].model == "a"

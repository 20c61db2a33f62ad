"""Clients that leave, mutated bodies, instances that fail: nothing leaks, nobody is lied to."""

from __future__ import annotations

import asyncio
import json
import logging
import random
import socket
import time

import dask
import httpx
import openai
import pytest

from daskserve import Service
from daskserve.errors import ClusterError, EngineStepFailed, InstanceLost
from daskserve.server.app import Frontend, ServerOptions
from daskserve.server.errors import Refusal, refusal_of, report

TEXT = {"model": "mock", "prompt": "hi", "max_tokens": 3}
CHAT = {"model": "mock", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}


def request_bytes(body, path="/v1/completions"):
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
    return head.encode() + b"content-length: %d\r\n\r\n" % len(data) + data


async def leave_after(url, body, delay_s, rudely):
    """Send a request and go, whatever has come by then."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    if rudely:  # a reset instead of an orderly end
        handle = writer.get_extra_info("socket")
        handle.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    writer.write(request_bytes(body))
    await asyncio.sleep(delay_s)
    writer.close()


def test_two_hundred_clients_that_leave_leave_nothing_behind(server, alongside, limits, eventually):
    """In every state: before a token, while queued for decode, in the middle, near the end."""
    chance = random.Random(5)

    def body():
        asked = {**TEXT, "prompt": "x" * chance.randrange(1, 300), "stream": chance.random() < 0.7}
        return {**asked, "n": chance.choice((1, 1, 3)), "max_tokens": chance.randrange(1, 150)}

    async def all_of_them(url):
        for _ in range(4):
            leaving = [
                leave_after(url, body(), chance.random() ** 3, chance.random() < 0.5)
                for _ in range(50)
            ]
            await asyncio.gather(*leaving)

    with alongside(server, limits=limits(max_in_flight=1000)) as other:
        asyncio.run(all_of_them(other.url))
        eventually(server.is_idle, 3)
        with other.http() as http:
            eventually(lambda: "num_requests_in_flight 0.0" in http.get("/metrics").text, 2)
            text = http.get("/metrics").text
        gone = float(text.partition('request_failure_total{code="client_gone"} ')[2].split()[0])
        assert gone > 50
        client = other.client()
        assert client.completions.create(**TEXT).usage.completion_tokens == 3


@pytest.mark.parametrize("is_stream", [True, False])
def test_a_client_that_leaves_frees_its_blocks_at_once(server, eventually, is_stream):
    asked = {**TEXT, "max_tokens": 5000, "stream": is_stream}
    asyncio.run(leave_after(server.url, asked, 0.3, rudely=False))
    eventually(server.is_idle, 2)


def mutated(body, chance):
    """One to three places of a body changed into something else, or bytes of it broken."""
    body = json.loads(json.dumps(body))
    for _ in range(chance.randrange(1, 4)):
        name = chance.choice(
            [
                *body,
                "n",
                "stop",
                "seed",
                "echo",
                "logprobs",
                "top_p",
                "stream_options",
                "x",
                "tools",
            ]
        )
        action = chance.randrange(5)
        if action == 0:
            body.pop(name, None)
        elif action == 1 and isinstance(body.get(name), list | str) and body[name]:
            body[name] = body[name] * chance.choice((2, 50))
        elif action == 2:
            body[name] = [body.get(name)]
        else:
            body[name] = chance.choice(ODD)
    data = bytearray(json.dumps(body).encode())
    if chance.random() < 0.15:
        for _ in range(chance.randrange(1, 6)):
            data[chance.randrange(len(data))] = chance.randrange(256)
    if chance.random() < 0.05:
        del data[chance.randrange(len(data)) :]
    return bytes(data)


ODD = [
    None, True, False, 0, -1, 1, 2, 7, 1.5, -0.0, 1e308, 2**31, 2**63, 2**64, 10**30, "", "x", "7",
    "\x00", "😀", "\u202e", "<|im_end|>", "../..", [], {}, [None], [[]], [{}], [1, "a"], {"a": 1},
    [0], [-1], [10**9], [2**70], ["a", "b"], [[5], [6]], {"type": "text"}, [{"role": "user"}],
    [{"role": "user", "content": [{"type": "text", "text": "hi"}]}], {"include_usage": True},
    [{"role": "user", "content": 5}], [["x"]], "a" * 3000,
]  # fmt: skip


def test_a_thousand_mutated_bodies_give_no_server_error(server, alongside, limits, eventually):
    chance = random.Random(0)
    seen = dict.fromkeys((200, 400, 404, 429), 0)
    short = limits(default_max_tokens=4)
    with alongside(server, limits=short) as other, other.http() as http:
        for number in range(1000):
            path, base = chance.choice((("/v1/completions", TEXT), ("/v1/chat/completions", CHAT)))
            data = mutated({**base, "stream": chance.random() < 0.3}, chance)
            answer = http.post(path, content=data, headers={"content-type": "application/json"})
            assert answer.status_code in seen, (number, data, answer.text)
            seen[answer.status_code] += 1
            if answer.status_code != 200:
                assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
            elif answer.headers["content-type"].startswith("text/event-stream"):
                assert answer.text.endswith("data: [DONE]\n\n"), (number, data, answer.text)
    assert seen[200] > 40 and seen[400] > 200
    eventually(server.is_idle, 5)


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (EngineStepFailed("a tensor at 0x7f"), 500, "engine_step_failed"),
        (InstanceLost("tcp://10.0.0.1:4"), 503, "unavailable"),
        (ClusterError("no PREFILL instance at tcp://10.0.0.1:4"), 503, "unavailable"),
        (RuntimeError("prompt: canary"), 500, "internal_error"),
        (TimeoutError(), 504, "deadline_exceeded"),
    ],
)
def test_what_fails_inside_is_told_without_the_inside(error, status, code, caplog):
    with caplog.at_level(logging.WARNING):
        report("req-1", error)
    assert len(caplog.records) == 1 and "req-1" in caplog.text
    refusal = refusal_of(error)
    assert (refusal.status, refusal.code) == (status, code)
    for text in (json.dumps(refusal.body()), caplog.text):
        assert not any(word in text for word in ("canary", "tcp://", "0x7f"))


def test_a_refusal_is_not_logged(caplog):
    report("req-1", Refusal(500, "x"))
    assert not caplog.records


def test_an_engine_that_fails_ends_the_stream_with_an_error(serve, mock, eventually, monkeypatch):
    """After the first tokens: an error event and no [DONE]. Before them: a status."""
    from daskserve.workers.mock import MockRunner

    honest = MockRunner.forward
    broken_from = [10**9]

    def forward(self, batch):
        if batch.context_tokens.max() >= broken_from[0]:
            raise RuntimeError("canary in the engine")
        return honest(self, batch)

    monkeypatch.setattr(MockRunner, "forward", forward)
    with serve(mock()) as server:
        client = server.client()
        broken_from[0] = 10
        received = []
        with pytest.raises(openai.APIError) as caught:
            for chunk in client.completions.create(**{**TEXT, "max_tokens": 50}, stream=True):
                received.append(chunk.choices[0].text)
        assert len(received) > 3
        assert "canary" not in str(caught.value) and caught.value.code == "engine_step_failed"
        broken_from[0] = 0
        for is_stream in (True, False):
            with pytest.raises(openai.InternalServerError) as caught:
                client.completions.create(**TEXT, stream=is_stream)
            assert caught.value.code == "engine_step_failed"
        broken_from[0] = 10**9
        assert client.completions.create(**TEXT).usage.completion_tokens == 3
        eventually(server.is_idle, 3)


@pytest.mark.slow
def test_a_silent_stream_is_kept_alive_by_comments(serve, mock, limits):
    asked = {**TEXT, "stream": True}
    slow, often = mock(mock_prefill_s=0.4), limits(ping_interval_s=0.1)
    with serve(slow, limits=often) as server, server.http() as http:
        text = http.post("/v1/completions", json=asked).text
        assert text.startswith(": ping\n\n") and text.endswith("data: [DONE]\n\n")
        assert text.count(": ping") < 10
        assert len(list(server.client().completions.create(**asked))) == 3
        refused = http.post("/v1/completions", json={**asked, "n": 0})
        assert refused.status_code == 400


def test_readiness_tells_of_each_role(serve, mock, eventually):
    with serve(mock()) as server, server.http() as http:
        body = http.get("/ready").json()
        assert body["ready"] and body["roles"]["decode"] == {"ready": 1, "loading": 0, "failed": 0}
        workers = server.probe.status()["workers"]
        [decode] = [address for address, role in workers.items() if role == "DECODE"]
        server.probe.client.retire_workers([decode], remove=True)
        eventually(lambda: http.get("/ready").status_code == 503, 10)
        body = http.get("/ready").json()
        assert not body["ready"]
        assert (body["roles"]["prefill"]["ready"], body["roles"]["decode"]["ready"]) == (1, 0)
        assert http.get("/health").status_code == 200


@pytest.mark.slow
def test_a_scheduler_that_is_gone_shows(lone, eventually):
    patience = dask.config.set({"distributed.comm.timeouts.connect": "1s"})
    with patience, lone() as (cluster, url), httpx.Client(base_url=url, timeout=30) as http:
        assert http.post("/v1/completions", json=TEXT).status_code == 200
        cluster.close()
        eventually(lambda: http.get("/ready").status_code == 503, 10)
        eventually(lambda: http.get("/health").status_code == 503, 20)
        assert http.get("/metrics").status_code == 200
        answer = http.post("/v1/completions", json=TEXT)
        assert answer.status_code == 503
        assert "tcp://" not in answer.text


def test_logs_and_metrics_hold_nothing_of_what_is_written(server, capfd, caplog):
    word = "canaryword"
    with server.http() as http, caplog.at_level(logging.DEBUG, "daskserve"):
        for path, body in (
            ("/v1/completions", {**TEXT, "prompt": word, "user": word}),
            ("/v1/completions", {**TEXT, "prompt": word, word: 1}),
            ("/v1/completions", {**TEXT, "model": word}),
            ("/v1/chat/completions", {**CHAT, "messages": [{"role": word, "content": word}]}),
        ):
            http.post(path, json=body)
            http.get(f"/v1/models/{word}%0a{word}")
        metrics = http.get("/metrics").text
    assert "POST /v1/completions 200" in caplog.text
    out, err = capfd.readouterr()
    assert word not in metrics + caplog.text + out + err


async def test_a_server_waits_for_its_model_with_open_ears(mock):
    """Before the model is loaded, health is well, readiness is not, and requests are told so."""
    service = Service.attach("tcp://127.0.0.1:1", mock(), asynchronous=True)
    app = Frontend(service, ServerOptions("mock")).asgi
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
        assert (await http.get("/health")).status_code == 200
        answer = await http.get("/ready")
        assert (answer.status_code, answer.json()["loading"]) == (503, True)
        answer = await http.post("/v1/completions", json=TEXT)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "not_ready")
        assert int(answer.headers["retry-after"]) > 0
        assert (await http.get("/metrics")).status_code == 200


def test_two_servers_share_one_scheduler(server, alongside, eventually):
    asked = {**TEXT, "temperature": 0, "max_tokens": 5}
    with alongside(server) as other:
        one, two = (s.client().completions.create(**asked) for s in (server, other))
        assert one.choices[0].text == two.choices[0].text
    started = time.monotonic()
    assert server.client().completions.create(**asked).choices  # the other one left alone
    assert time.monotonic() - started < 5
    eventually(server.is_idle, 3)


def test_a_server_that_stops_tells_its_streams(server, alongside, limits, eventually):
    asked = {**TEXT, "max_tokens": 5000}
    with httpx.Client(timeout=60) as http:
        with alongside(server, limits=limits(drain_timeout_s=1)) as other:
            url = f"{other.url}/v1/completions"
            stream = http.send(
                http.build_request("POST", url, json={**asked, "stream": True}), stream=True
            )
            lines = stream.iter_lines()
            next(lines)
        *_, last = filter(None, lines)
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "stopping"
        stream.close()
    eventually(server.is_idle, 3)

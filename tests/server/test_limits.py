"""What is too large, too deep, too slow or too much is refused early, and the server lives on."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from pathlib import Path

import httpx
import openai
import psutil
import pytest

TEXT = {"model": "mock", "prompt": "hi", "max_tokens": 3}


def rss_mib():
    return psutil.Process(os.getpid()).memory_info().rss / 2**20


def raw(server, data, timeout_s=10.0):
    """Send bytes as they are; what comes back until the server closes or is silent."""
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=timeout_s) as connection:
        received = b""
        try:
            connection.sendall(data)
            while chunk := connection.recv(65536):
                received += chunk
                if b"\r\n\r\n" in received:
                    break
        except (ConnectionError, TimeoutError):
            pass
        return received


@pytest.mark.parametrize("length", [{}, {"content-length": str(100 * 2**20)}])
def test_a_body_that_is_too_large_is_not_kept(server, length):
    def body():
        for _ in range(100):
            yield b"x" * 2**20

    before = rss_mib()
    with server.http() as http:
        try:
            headers = {"content-type": "application/json"} | length
            answer = http.post("/v1/completions", content=body(), headers=headers)
            assert answer.json()["error"]["code"] == "body_too_large"
            assert answer.status_code == 413
        except httpx.TransportError:
            pass  # it was told to go before it had sent everything
    assert rss_mib() - before < 50


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 10_000 + b"]" * 10_000,
        b'{"prompt": ' + b"[" * 10_000 + b"]" * 10_000 + b"}",
        b'{"prompt": ' + b'{"a":' * 5_000 + b"1" + b"}" * 5_000 + b"}",
        b"",
        b"{",
        b"null",
        b"[]",
        b'"x"',
        b"\xff\xfe",
        b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "a", "temperature": Infinity}',
        b'{"prompt": "a", "temperature": 1e400}',
        b'{"prompt": "a", "seed": 1e400}',
        b'{"prompt": "a", "max_tokens": 1' + b"0" * 5000 + b"}",
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "a", "\\ud800": 1}',
        b'{"prompt": "a", "stop": "\\udfff"}',
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_broken_json_is_refused(server, path, body):
    with server.http() as http:
        answer = http.post(path, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


def test_heads_are_bounded(server):
    line = b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\n"
    started = time.monotonic()
    assert b" 400 " in raw(server, line + b"x-long: " + b"a" * 2**20 + b"\r\n\r\n")
    assert b" 400 " in raw(server, line + b"a: b\r\n" * 100_000 + b"\r\n")
    assert b" 400 " in raw(server, b"GET /" + b"a" * 2**20 + b" HTTP/1.1\r\n\r\n")
    assert time.monotonic() - started < 5
    with server.http() as http:
        assert http.get("/health").status_code == 200


def test_slow_senders_are_cut(server, alongside, limits):
    with alongside(server, limits=limits(read_timeout_s=0.5)) as other:
        started = time.monotonic()
        assert raw(other, b"") == b""
        assert raw(other, b"GET /health HTTP/1.1\r\nhost: ") == b""
        head = b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\n"
        head += b"content-type: application/json\r\ncontent-length: 100\r\n\r\n"
        assert b" 408 " in raw(other, head + b'{"prompt"')
        assert time.monotonic() - started < 4


def test_connections_are_bounded(server, alongside, limits):
    with alongside(server, limits=limits(max_connections=5)) as other:
        host, port = other.url.removeprefix("http://").split(":")
        held = [socket.create_connection((host, int(port))) for _ in range(5)]
        try:
            assert raw(other, b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n") == b""
        finally:
            for connection in held:
                connection.close()


def test_a_huge_prompt_holds_up_nobody(server, eventually):
    """5 MB is beyond the body; just below it, it is refused while health answers quickly."""
    worst_s = 0.0
    is_over = threading.Event()

    def watch():
        nonlocal worst_s
        with server.http() as http:
            while not is_over.is_set():
                started = time.monotonic()
                assert http.get("/health").status_code == 200
                worst_s = max(worst_s, time.monotonic() - started)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        with server.http() as http:
            for size, statuses in ((5_000_000, (413,)), (900_000, (400,)), (100_000, (400, 200))):
                words = "some words and more of them " * (size // 28)
                answer = http.post("/v1/completions", json={**TEXT, "prompt": words})
                assert answer.status_code in statuses
            ids = {**TEXT, "prompt": [[70] * 4000] * 100, "max_tokens": 1}
            assert http.post("/v1/completions", json=ids).status_code in (200, 400, 429)
    finally:
        is_over.set()
        thread.join()
    assert worst_s < 0.5
    eventually(server.is_idle, 10)


@pytest.fixture(scope="module")
def busy(server, alongside, limits):
    """A server on the same instances that takes three answers at a time, two of one key."""
    bounds = limits(max_in_flight=3, max_in_flight_per_key=2)
    with alongside(server, limits=bounds, keys=("a" * 20, "b" * 20)) as other:
        yield other


def hold(busy, count, key="a" * 20, **more):
    """Streams of which the first token has come."""
    asked = {**TEXT, "max_tokens": 3000, "stream": True, **more}
    streams = [busy.client(api_key=key).completions.create(**asked) for _ in range(count)]
    for stream in streams:
        next(iter(stream))
    return streams


def test_too_many_answers_are_refused_at_once(busy, eventually, server):
    with server.http() as http:
        assert http.get("/health").status_code == 200
    held = [*hold(busy, 2), *hold(busy, 1, "b" * 20)]
    try:
        for key in ("b" * 20, "a" * 20):
            started = time.monotonic()
            with pytest.raises(openai.RateLimitError, match="server is at its limit") as caught:
                busy.client(api_key=key).completions.create(**TEXT)
            assert time.monotonic() - started < 0.5
            assert int(caught.value.response.headers["retry-after"]) >= 1
            assert caught.value.code == "overloaded"
    finally:
        for stream in held:
            stream.close()
    eventually(server.is_idle, 5)
    assert busy.client(api_key="a" * 20).completions.create(**TEXT).usage.completion_tokens == 3


def test_one_key_leaves_room_for_others(busy, eventually, server):
    held = hold(busy, 2)
    try:
        with pytest.raises(openai.RateLimitError, match="this key has its 2"):
            busy.client(api_key="a" * 20).completions.create(**TEXT)
        assert busy.client(api_key="b" * 20).completions.create(**TEXT).choices
    finally:
        for stream in held:
            stream.close()
    eventually(server.is_idle, 5)


def test_choices_count_as_answers(busy):
    for asked in ({"n": 4}, {"prompt": ["a"] * 3}):
        with pytest.raises(openai.RateLimitError):
            busy.client(api_key="a" * 20).completions.create(**{**TEXT, **asked})
    assert len(busy.client(api_key="a" * 20).completions.create(**TEXT, n=2).choices) == 2


def test_an_answer_that_takes_too_long_is_given_up(server, alongside, limits, eventually):
    asked = {**TEXT, "max_tokens": 3000}
    with alongside(server, limits=limits(request_timeout_s=0.5)) as other:
        client = other.client()
        with pytest.raises(openai.InternalServerError) as caught:
            client.completions.create(**asked)
        assert (caught.value.status_code, caught.value.code) == (504, "deadline_exceeded")
        with pytest.raises(openai.APIError) as caught:
            list(client.completions.create(**asked, stream=True))
        assert caught.value.code == "deadline_exceeded"
        with other.http() as http:
            text = http.post("/v1/completions", json={**asked, "stream": True}).text
        *_, last, end = text.split("\n\n")
        assert end == "" and "error" in json.loads(last.removeprefix("data: "))
        assert "[DONE]" not in text
    eventually(server.is_idle, 5)


def test_a_reader_that_takes_nothing_is_dropped(server, alongside, limits, eventually):
    body = json.dumps({**TEXT, "n": 16, "max_tokens": 300, "logprobs": 20, "stream": True}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
    with alongside(server, limits=limits(write_timeout_s=0.5, max_in_flight=100)) as other:
        host, port = other.url.removeprefix("http://").split(":")
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect((host, int(port)))
            connection.sendall(head + b"content-length: %d\r\n\r\n" % len(body) + body)
            eventually(lambda: not server.is_idle(), 5)
            eventually(server.is_idle, 20)
            with other.http() as http:
                metrics = http.get("/metrics").text
            assert 'daskserve:request_failure_total{code="client_gone"} 1.0' in metrics


def test_nothing_of_the_inside_is_in_errors(server):
    inside = ("Traceback", "/home", "/work", "site-packages", "tcp://", "starlette", "uvicorn")
    with server.http() as http:
        answers = [
            http.get("/none"),
            http.put("/v1/completions"),
            http.post("/v1/completions", json={}),
            http.post("/v1/completions", json={**TEXT, "prompt": [10**9]}),
            http.post("/v1/chat/completions", json={**TEXT, "messages": "x"}),
            http.get("/v1/models/" + "%2e%2e/" * 5 + "etc/passwd"),
        ]
    for answer in answers:
        assert 400 <= answer.status_code < 500
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
        assert not any(word in answer.text for word in inside)
        assert "server" not in answer.headers


def test_no_assert_guards_the_server():
    """Checks hold under ``python -O`` too, and nothing is unpickled."""
    folder = Path(__file__).parents[2] / "daskserve" / "server"
    source = "\n".join(path.read_text() for path in folder.glob("*.py"))
    assert "\n    assert " not in source and "pickle" not in source and "eval(" not in source

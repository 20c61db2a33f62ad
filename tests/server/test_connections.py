"""Connections that are slow, half broken or left: each ends, and nothing is held for it."""

from __future__ import annotations

import socket
import time
from contextlib import suppress

import orjson
import psutil
import pytest

EARLY = b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: text/plain\r\n"
"""Answered with 415 before its body is there."""


def connected(server):
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=5)


def crawled(server, head):
    """What comes back while a byte is sent every 0.1 s; must end within 5 s."""
    received, deadline = b"", time.monotonic() + 5
    with connected(server) as client, suppress(ConnectionError):
        client.settimeout(0.1)
        client.sendall(head)
        while time.monotonic() < deadline:
            with suppress(TimeoutError):
                if not (data := client.recv(4096)):
                    break
                received += data
            client.sendall(b"x")
    assert time.monotonic() < deadline
    return received


def test_senders_that_crawl_are_cut(server, alongside, limits, tmp_path):
    upload = b"POST /v1/files HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 999\r\n"
    upload += b"content-type: multipart/form-data; boundary=x\r\n\r\n--x\r\n"
    with alongside(server, limits=limits(read_timeout_s=0.4), state_folder=tmp_path / "s") as other:
        assert b" 415 " in crawled(other, EARLY + b"content-length: 999\r\n\r\n")
        assert b" 408 " in crawled(other, upload)


def test_uploads_at_once_are_bounded(server, alongside, tmp_path, eventually):
    head = b"POST /v1/files HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 999\r\n"
    head += b"content-type: multipart/form-data; boundary=x\r\n\r\n"
    with alongside(server, state_folder=tmp_path / "s") as other, other.http() as http:
        form = {"data": {"purpose": "batch"}, "files": {"file": ("x.jsonl", b"{}")}}
        held = [connected(other) for _ in range(8)]
        for client in held:
            client.sendall(head)
        eventually(lambda: http.post("/v1/files", **form).status_code == 429)
        for client in held:
            client.close()
        eventually(lambda: http.post("/v1/files", **form).status_code == 200)


def test_rubbish_after_an_answer_only_ends_the_connection(server, caplog):
    with connected(server) as client:
        client.sendall(EARLY + b"transfer-encoding: chunked\r\n\r\n1\r\nx\r\n")
        received = b""
        while b"}}" not in received:
            received += client.recv(4096)
        assert b" 415 " in received
        client.sendall(b"no size\r\n")
        assert client.recv(4096) == b""
    assert not [record for record in caplog.records if record.exc_info]


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_client_that_leaves_with_a_second_request_sent_is_seen(server, is_stream, eventually):
    body = orjson.dumps(
        {"prompt": "on", "max_tokens": 3000, "ignore_eos": True, "stream": is_stream}
    )
    request = b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\n"
    request += b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body) + body
    with connected(server) as client:
        client.sendall(request)
        eventually(lambda: not server.is_idle())
        client.sendall(request)
        time.sleep(0.1)
    eventually(server.is_idle)


def test_a_reader_that_takes_nothing_and_says_goodbye_is_cut(server, alongside, limits, eventually):
    body = orjson.dumps({"prompt": "on", "max_tokens": 3000, "ignore_eos": True, "stream": True})
    request = b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\n"
    request += b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body) + body
    with alongside(server, limits=limits(write_timeout_s=0.5)) as other, socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        host, port = other.url.removeprefix("http://").split(":")
        client.connect((host, int(port)))
        client.sendall(request)
        eventually(lambda: not server.is_idle())
        time.sleep(1)
        client.shutdown(socket.SHUT_WR)
        eventually(server.is_idle)
        process = psutil.Process()
        address = client.getsockname()
        eventually(lambda: address not in [c.raddr for c in process.net_connections("tcp")], 5)

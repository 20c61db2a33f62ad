"""The client against servers that behave badly: what it sees, and how it counts failures."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import ssl
import statistics
import subprocess

import pytest

from daskserve.bench.exchange import Connections
from daskserve.bench.prompts import RandomTokens
from daskserve.bench.record import GIVEN_UP, OK, PENDING
from daskserve.bench.run import OpenLoop
from daskserve.bench.target import Target
from daskserve.bench.watch import Watch
from daskserve.core.slo import SLO
from daskserve.errors import ConfigError
from daskserve.planner.workload import Workload

USAGE = {"prompt_tokens": 9, "completion_tokens": 3}


def event(record) -> bytes:
    return (
        b"data: " + (record if isinstance(record, bytes) else json.dumps(record).encode()) + b"\n\n"
    )


def token(text="a", reason=None):
    return event({"choices": [{"text": text, "finish_reason": reason}]})


ENDING = event({"choices": [], "usage": USAGE}) + event(b"[DONE]")
SOUND = [token(), token(), token("a", "length") + ENDING]


@pytest.fixture
def answers(head, as_chunk):
    """A server's answer of these pieces, so many seconds between them, then the end of the body."""

    def make(pieces, pause_s=0.0, is_whole=True, start=head):
        async def answer(reader, writer):
            writer.write(start)
            for piece in pieces:
                writer.write(as_chunk(piece))
                await writer.drain()
                await asyncio.sleep(pause_s)
            if is_whole:
                writer.write(b"0\r\n\r\n")
            else:
                writer.close()

        return answer

    return make


async def run(url, arrivals, *, timeout_s=5.0, watch=None, stop=None, max_tokens=3, **given):
    target = Target(url, "m", **given)
    connections = Connections(target)
    loop = OpenLoop(target, connections, RandomTokens(0), timeout_s, stop or asyncio.Event())
    count = len(arrivals)
    load = Workload.from_arrays(arrivals, [4] * count, [max_tokens] * count)
    try:
        return await loop.run(load, watch)
    finally:
        await connections.aclose()


async def test_times_and_tokens_are_those_of_the_stream(scripted, answers):
    async with scripted(answers(SOUND, pause_s=0.3)) as url:
        [_, record], _ = await run(url, [0.0, 1.0])
    assert (record.status, record.prompt_tokens, record.output_tokens) == (OK, 9, 3)
    assert 0 < record.ttft_s < 0.29
    assert 0.59 < record.last_s - record.first_s < 0.89
    assert record.tpot_s == pytest.approx((record.last_s - record.first_s) / 2)
    assert len(record.gaps_s) == 2
    assert sum(record.gaps_s) == pytest.approx(record.last_s - record.first_s, abs=1e-5)


async def test_a_server_without_usage_has_its_tokens_counted(scripted, answers):
    async with scripted(answers([token(), token(), token("a", "stop"), event(b"[DONE]")])) as url:
        [record], _ = await run(url, [0.0])
    assert (record.status, record.prompt_tokens, record.output_tokens) == (OK, 4, 3)


async def test_requests_leave_at_their_times_while_the_server_sits_on_them(scripted, answers):
    at_work = most_at_work = 0

    async def slow(reader, writer):
        nonlocal at_work, most_at_work
        at_work += 1
        most_at_work = max(most_at_work, at_work)
        await asyncio.sleep(1.5)
        at_work -= 1
        await answers(SOUND)(reader, writer)

    arrivals = [0.02 * number for number in range(20)]
    async with scripted(slow) as url:
        records, lag = await run(url, arrivals)
    assert most_at_work == 20
    assert statistics.median(lag.sending_s) < 0.2
    assert min(record.ttft_s for record in records) > 1.49


def refusal(status, body):
    return f"HTTP/1.1 {status} X\r\ncontent-length: {len(body)}\r\n\r\n{body}".encode()


@pytest.mark.parametrize("is_refused", [False, True])
async def test_connections_are_used_again(scripted, answers, is_refused):
    ports = []

    async def noting(reader, writer):
        ports.append(writer.get_extra_info("peername")[1])
        if is_refused:
            writer.write(refusal(429, "{}"))
        else:
            await answers(SOUND)(reader, writer)

    async with scripted(noting) as url:
        await run(url, [0.0, 0.3, 0.6])
    assert len(ports) == 3 and len(set(ports)) == 1


async def test_a_connection_that_broke_is_made_again(scripted, answers):
    broken = answers(SOUND[:1], is_whole=False)
    sound = answers(SOUND)
    turns = [broken, sound]

    async def in_turn(reader, writer):
        await turns.pop(0)(reader, writer)

    async with scripted(in_turn) as url:
        records, _ = await run(url, [0.0, 0.5])
    assert [record.status for record in records] == ["broken off", OK]


FAILURES = {
    "cut after the first token": (SOUND[:1], {"is_whole": False}, "broken off"),
    "ended without a reason": ([token(), token()], {}, "broken off"),
    "nothing at all": ([], {"start": b"", "is_whole": False}, "broken off"),
    "no HTTP": ([], {"start": b"SSH-2.0 hello\r\n\r\n", "is_whole": False}, "broken off"),
    "an error event": (
        [token(), event({"error": {"message": "late", "code": "deadline_exceeded"}})],
        {},
        "error event deadline_exceeded",
    ),
    "no JSON": ([b"data: <html>\n\n"], {}, "bad answer"),
    "too slow": ([token()] * 40, {"pause_s": 0.1}, "timeout"),
}


@pytest.mark.parametrize("name", FAILURES)
async def test_failures_have_kinds(scripted, answers, name):
    pieces, options, kind = FAILURES[name]
    async with scripted(answers(pieces, **options)) as url:
        records, _ = await run(url, [0.0, 0.0], timeout_s=0.6)
    assert [record.status for record in records] == [kind] * 2
    assert all(record.message and record.end_s > record.sent_s for record in records)


@pytest.mark.parametrize(
    ("status", "body", "kind", "message"),
    [
        (429, '{"error": {"message": "full", "code": "overloaded"}}', "429 overloaded", "full"),
        (401, '{"error": {"message": "no", "type": "auth"}}', "401 auth", "no"),
        (404, '{"object": "error", "message": "what?", "code": 404}', "404", "what?"),
        (502, "<html>bad gateway</html>", "502", "<html>bad gateway</html>"),
        (500, "", "500", ""),
    ],
)
async def test_refusals_are_counted_by_status_and_code(scripted, status, body, kind, message):
    async def refuse(reader, writer):
        writer.write(refusal(status, body))

    async with scripted(refuse) as url:
        [record], _ = await run(url, [0.0])
    assert (record.status, record.message) == (kind, message)


async def test_nobody_listens():
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
    [record], _ = await run(f"http://127.0.0.1:{port}", [0.0])
    assert record.status == "unreachable"


async def test_a_stop_keeps_what_was_measured(scripted, answers):
    stop = asyncio.Event()
    asyncio.get_running_loop().call_later(0.25, stop.set)
    async with scripted(answers(SOUND, pause_s=0.05)) as url:
        records, _ = await run(url, [0.0, 0.2, 60.0], stop=stop)
    assert [record.status for record in records] == [OK, PENDING]


async def test_a_hopeless_run_ends_early_and_waits_for_nobody(scripted, answers):
    slo = SLO(ttft_s=0.05, tpot_s=0.05)
    arrivals = [0.02 * number for number in range(200)]

    async def never(reader, writer):
        await asyncio.sleep(30)

    async with scripted(never) as url:
        records, _ = await asyncio.wait_for(run(url, arrivals, watch=Watch(slo, 200)), 5)
    assert 20 < len(records) < 100
    assert {record.status for record in records} == {GIVEN_UP}


async def test_a_watched_run_that_meets_its_limits_is_left_alone(scripted, answers):
    slo = SLO(ttft_s=1.0, tpot_s=1.0)
    async with scripted(answers(SOUND)) as url:
        records, _ = await run(url, [0.01 * n for n in range(30)], watch=Watch(slo, 30))
    assert [record.status for record in records] == [OK] * 30


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
async def test_tls_needs_the_authority_of_the_server(scripted, answers, tmp_path):
    cert, tls_key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = (
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 "
        f"-subj /CN=127.0.0.1 -addext subjectAltName=IP:127.0.0.1 -out {cert} -keyout {tls_key}"
    )
    subprocess.run(command.split(), check=True, capture_output=True)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(cert, tls_key)
    async with scripted(answers(SOUND), tls) as url:
        [trusted], _ = await run(url, [0.0], ca_file=str(cert))
        [unknown], _ = await run(url, [0.0])
    assert trusted.status == OK
    assert unknown.status == "unreachable" and "certificate" in unknown.message.lower()
    with pytest.raises(ConfigError, match="cannot read certificates"):
        await run(url, [0.0], ca_file=str(tls_key))

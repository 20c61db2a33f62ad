"""The command itself, with processes of its own: who listens, what is visible, what it survives."""

from __future__ import annotations

import os
import re
import signal
import stat
import subprocess
import sys
import time
from contextlib import contextmanager

import httpx
import openai
import psutil
import pytest

KEY = "a-key-that-must-not-show"


@contextmanager
def command(*options, **environment):
    """``daskserve serve`` on a free port, ready; the process and a client."""
    arguments = [sys.executable, "-m", "daskserve.cli", "serve", "--port", "0", *map(str, options)]
    process = subprocess.Popen(
        arguments,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "DASKSERVE_API_KEYS": KEY, **environment},
        umask=0,
    )
    try:
        url = re.search(r"http://127\.0\.0\.1:\d+", process.stderr.readline())[0]
        headers = {"authorization": f"Bearer {KEY}"}
        deadline = time.monotonic() + 100
        while httpx.get(f"{url}/ready", headers=headers).status_code != 200:
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.2)
        with openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0) as client:
            yield process, client
    finally:
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "Traceback" not in errors and KEY not in errors
    _, alive = psutil.wait_procs(children, timeout=10)
    assert not alive


@pytest.mark.slow
def test_defaults_are_closed_to_others(tmp_path):
    state = tmp_path / "a" / "state"
    with command("--model", "mock", "--state-dir", state) as (process, client):
        tree = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        listening = {
            connection.laddr.ip
            for one in tree
            for connection in one.net_connections("tcp")
            if connection.status == psutil.CONN_LISTEN
        }
        assert listening == {"127.0.0.1"}
        assert not any(KEY in part for one in tree for part in one.cmdline())
        client.files.create(file=("x.jsonl", b"{}"), purpose="batch")
    for path in (state, *state.rglob("*")):  # although the umask of the process is 000
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (0o700 if path.is_dir() else 0o600), path


@pytest.mark.slow
def test_a_stream_goes_on_when_workers_are_killed(tmp_path):
    asked = {"model": "mock", "prompt": "go on", "max_tokens": 400, "temperature": 0}
    with command("--model", "mock", "--state-dir", tmp_path / "state") as (process, client):
        expected = client.completions.create(**asked).choices[0].text
        received, killed = "", 0
        for number, chunk in enumerate(client.completions.create(**asked, stream=True)):
            received += chunk.choices[0].text
            if number in (50, 200):
                for worker in psutil.Process(process.pid).children(recursive=True):
                    if "spawn_main" in " ".join(worker.cmdline()):
                        worker.kill()
                        killed += 1
        assert killed >= 2
        assert received == expected


@pytest.mark.slow
def test_the_default_model_answers(tmp_path, smollm2_dir):
    options = ("--colocated", 1, "--dtype", "float32", "--state-dir", tmp_path / "state")
    with command(*options) as (_, client):
        messages = [{"role": "user", "content": "What is the capital of France?"}]
        asked = {"model": "smollm2-135m", "messages": messages, "temperature": 0, "max_tokens": 24}
        whole = client.chat.completions.create(**asked).choices[0]
        assert "Paris" in whole.message.content and whole.finish_reason == "stop"
        chunks = list(client.chat.completions.create(**asked, stream=True))
        text = "".join(chunk.choices[0].delta.content for chunk in chunks)
        assert text == whole.message.content


@pytest.mark.slow
def test_a_model_that_cannot_be_loaded_ends_the_command(tmp_path):
    arguments = [
        "serve",
        "--port",
        "0",
        "--model",
        str(tmp_path),
        "--state-dir",
        str(tmp_path / "s"),
    ]
    done = subprocess.run(
        [sys.executable, "-m", "daskserve.cli", *arguments],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("error: ")
    assert "Traceback" not in done.stderr

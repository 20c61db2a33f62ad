"""The shell commands of the README: run here with the mock model, or a reason why not."""

from __future__ import annotations

import re
import shlex
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8").replace("\\\n", " ")
SHELL = "\n".join(re.findall(r"```sh\n(.*?)```", README, re.DOTALL))
COMMANDS = [line for line in SHELL.splitlines() if line and not line.startswith("#")]

NOT_RUN = {
    "make ": "installs PyTorch; continuous integration runs `make test`",
    "pip install ": "installs from the package index",
    "export DASK_DASKSERVE__RANK__": "ranks are started in tests/service/test_ranks.py",
    "DASK_DASKSERVE__RANK__NUMBER=": "ranks are started in tests/service/test_ranks.py",
    "daskserve bench --find-goodput ": "minutes; a short one is in tests/bench/test_command.py",
    "daskserve plan --model ": "run in tests/planner/test_readme_planning.py",
    "daskserve simulate placement.yaml --prompt-tokens ": "run in test_readme_planning.py too",
    "daskserve deploy ": "written and started in tests/deploy",
    "daskserve doctor ": "tests/doctor",
    "daskserve run-batch --scheduler tcp://gpu-a": "on other hosts; tests/deploy/test_started.py",
    "daskserve serve --prefill 4 ": "six instances; replanned in tests/service and tests/replay",
    "daskserve replay ": "tests/replay",
    "dask cuda worker ": "needs a GPU; written in tests/deploy",
    "daskserve serve --device cuda": "needs a GPU; tests/service/test_cards.py",
    "daskserve dashboard ": "pages are served in tests/dashboards",
}
RUN = (
    "daskserve run-batch ",
    "dask worker ",
    "daskserve serve",
    "curl ",
    "daskserve bench ",
    "daskserve calibrate ",
    "daskserve plan --latency ",
    "daskserve simulate placement.yaml --latency ",
)
SHORTER = {
    "--requests 200": "--requests 5",
    "--duration 60": "--duration 2",
    "--rate 0.5": "--rate 0.5 --seeds 1",
}


def test_every_command_is_run_or_says_why_not():
    assert len(COMMANDS) > 20
    for command in COMMANDS:
        found = [start for start in (*RUN, *NOT_RUN) if command.startswith(start)]
        assert found, f"run it here, or name it in NOT_RUN: {command}"
    for start in (*RUN, *NOT_RUN):
        assert any(command.startswith(start) for command in COMMANDS), f"gone: {start}"


def written(start: str, **replaced: str) -> list[list[str]]:
    """Words of the commands that are run, shorter and with the mock."""
    found = []
    for command in COMMANDS:
        if command.startswith(start) and not command.startswith(tuple(NOT_RUN)):
            for old, new in {**SHORTER, "smollm2-135m": "mock", **replaced}.items():
                command = command.replace(old, new)
            words = shlex.split(command, comments=True)
            found.append([*PROGRAMS.get(words[0], words[:1]), *words[1:]])
    assert found
    return found


PROGRAMS = {
    "daskserve": [sys.executable, "-m", "daskserve.cli"],
    "dask": [sys.executable, "-m", "dask"],
}


def finish(words: list[str], folder: Path) -> str:
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, f"{' '.join(words)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@contextmanager
def running(words: list[str], folder: Path):
    process = subprocess.Popen(words, cwd=folder, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=90)


@contextmanager
def served(words: list[str], folder: Path):
    """A server of one of the commands, when it is ready; its address."""
    private = ["--port", "0", "--state-dir", str(folder / "state")]
    model = [] if "--placement" in words else ["--model", "mock"]
    with running([*words, *model, *private], folder) as process:
        url = re.search(r"http://127\.0\.0\.1:\d+", process.stderr.readline())[0]
        deadline = time.monotonic() + 200
        while httpx.get(f"{url}/ready").status_code != 200:
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.2)
        yield url
    assert process.returncode == 0


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples" / "prompts.jsonl").write_text('{"prompt": "hi", "max_tokens": 3}\n')
    return tmp_path


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_batches_and_workers_of_a_cluster_of_your_own(folder):
    here = [sys.executable, "-m", "dask", "scheduler", "--host", "127.0.0.1", "--port", "0"]
    with running([*here, "--no-dashboard", "--scheduler-file", "scheduler.json"], folder):
        deadline = time.monotonic() + 100
        while not (folder / "scheduler.json").exists():
            assert time.monotonic() < deadline
            time.sleep(0.2)
        text = (folder / "scheduler.json").read_text()
        address = re.search(r"tcp://127\.0\.0\.1:\d+", text)[0]
        prefill, decode = written("dask worker ", **{"tcp://10.0.0.1:8786": address})
        with (
            running([*prefill, "--no-dashboard"], folder),
            running([*decode, "--no-dashboard"], folder),
        ):
            time.sleep(10)
            for words in written("daskserve run-batch ", **{"tcp://10.0.0.1:8786": address}):
                finish([*words, "--model", "mock"], folder)
            serve = written("daskserve serve --scheduler", **{"tcp://10.0.0.1:8786": address})
            with served(serve[0], folder) as url:
                assert httpx.get(f"{url}/v1/models").status_code == 200
    for name in ("apart", "colocated", "cluster"):
        assert (folder / "out" / f"{name}.jsonl").read_text().count("\n") == 1


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_machine_is_calibrated_planned_served_and_benchmarked(folder):
    [calibrate] = written("daskserve calibrate ")
    finish([*calibrate, "--quick", "--model", "mock"], folder)
    for start in ("daskserve plan --latency ", "daskserve simulate placement.yaml --latency "):
        for words in written(start):
            assert "requests" in finish(words, folder)
    plain, limited, placed, *_ = written("daskserve serve")
    for words in (limited, placed):
        with served(words, folder) as url:
            assert httpx.get(f"{url}/ready").json()["ready"]
    with served(plain, folder) as url:
        for words in written("curl ", **{"http://127.0.0.1:8000": url}):
            assert finish(words, folder).rstrip().endswith("data: [DONE]")
        for words in written("daskserve bench ", **{"http://127.0.0.1:8000": url}):
            is_given = "--url" in words or "--recorded" in words
            finish([*words, *([] if is_given else ["--url", url])], folder)

"""Jobs whose driver, worker or disk gives up half-way: no row is lost, none is written twice."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time

import pytest

from daskserve import SamplingParams, run_batch

NUM_ROWS = 100
PARAMS = SamplingParams(max_tokens=16)


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "in.jsonl"
    rows = ({"custom_id": f"id-{i}", "prompt": f"prompt number {i}"} for i in range(NUM_ROWS))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def expected(service, tmp_path_factory):
    """The answers of a job that nothing interrupts."""
    prompts = [{"custom_id": f"id-{i}", "prompt": f"prompt number {i}"} for i in range(NUM_ROWS)]
    output = tmp_path_factory.mktemp("uninterrupted") / "out.jsonl"
    run_batch(service, prompts, output, params=PARAMS, show_progress=False)
    return sorted(output.read_text().splitlines())


def command(service, source, output):
    address = service.client.scheduler.address
    arguments = [
        "-i",
        str(source),
        "-o",
        str(output),
        "--max-tokens",
        "16",
        "--max-in-flight",
        "20",
    ]
    placement = ["--model", "mock", "--scheduler", address]
    return [sys.executable, "-m", "daskserve.cli", "run-batch", *placement, *arguments]


def start(service, source, output):
    return subprocess.Popen(
        command(service, source, output),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def num_lines(path):
    return path.read_bytes().count(b"\n") if path.exists() else 0


def wait_for_lines(process, output, count):
    deadline = time.monotonic() + 60
    while num_lines(output) < count and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.002)


def finish(service, source, output):
    done = subprocess.run(
        command(service, source, output), capture_output=True, text=True, timeout=90
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def kill_and_resume(service, source, output, num_kills, expected):
    rng = random.Random(num_kills)
    for target in sorted(rng.sample(range(NUM_ROWS - 10), num_kills)):
        process = start(service, source, output)
        wait_for_lines(process, output, target)
        time.sleep(rng.random() * 0.01)
        process.kill()
        process.communicate(timeout=30)
    summary = finish(service, source, output)
    assert sorted(output.read_text().splitlines()) == expected
    assert f"{NUM_ROWS} rows: {NUM_ROWS} answered, 0 failed" in summary


def test_killed_driver_resumes_to_the_same_answers(service, source, tmp_path, expected):
    kill_and_resume(service, source, tmp_path / "out.jsonl", 2, expected)


@pytest.mark.slow
def test_driver_killed_ten_times_resumes_to_the_same_answers(service, source, tmp_path, expected):
    kill_and_resume(service, source, tmp_path / "out.jsonl", 10, expected)
    deadline = time.monotonic() + 10
    while any(load.used_kv_blocks or load.num_running for load in service.load().values()):
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)
def test_stopped_job_says_so_and_goes_on(service, source, tmp_path, expected, number):
    output = tmp_path / "out.jsonl"
    process = start(service, source, output)
    wait_for_lines(process, output, 40)
    process.send_signal(number)
    _, message = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "stopped; run the same command again to go on" in message
    assert "Traceback" not in message
    assert 40 <= num_lines(output) < NUM_ROWS
    assert output.read_bytes().endswith(b"\n")
    finish(service, source, output)
    assert sorted(output.read_text().splitlines()) == expected


def test_killed_decode_worker_loses_and_repeats_no_row(service, source, tmp_path, expected):
    [decode] = [i.address for i in service.info() if i.role == "DECODE"]
    pid = service.client.run(os.getpid, workers=[decode])[decode]
    output = tmp_path / "out.jsonl"
    summaries = []

    def job():
        summaries.append(
            run_batch(service, source, output, params=PARAMS, max_in_flight=20, show_progress=False)
        )

    thread = threading.Thread(target=job)
    thread.start()
    deadline = time.monotonic() + 60
    while num_lines(output) < NUM_ROWS // 2:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    os.kill(pid, signal.SIGKILL)
    thread.join(100)
    assert [s.num_succeeded for s in summaries] == [NUM_ROWS]
    assert sorted(output.read_text().splitlines()) == expected


def can_mount():
    if shutil.which("unshare") is None:
        return False
    mount = ["unshare", "-rm", "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
    return subprocess.run(mount, capture_output=True).returncode == 0


@pytest.mark.skipif(not can_mount(), reason="no user namespaces to mount a small disk in")
def test_full_disk_stops_the_job_which_goes_on_when_there_is_room(
    service, source, tmp_path, expected
):
    disk = tmp_path / "disk"
    disk.mkdir()
    job = " ".join(command(service, source, disk / "out.jsonl"))
    script = f"""
        mount -t tmpfs -o size=20k tmpfs {disk} || exit 99
        {job} 2>{tmp_path}/full.txt && exit 98
        cp {disk}/out.jsonl {tmp_path}/full.jsonl
        mount -o remount,size=4m {disk}
        {job} || exit 97
        cp {disk}/out.jsonl {tmp_path}/out.jsonl
    """
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", script], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    message = (tmp_path / "full.txt").read_text()
    assert "error: cannot write output" in message and "No space left on device" in message
    assert "Traceback" not in message
    kept = (tmp_path / "full.jsonl").read_text().splitlines()
    assert 0 < len(kept) < NUM_ROWS and set(kept) < set(expected)
    assert sorted((tmp_path / "out.jsonl").read_text().splitlines()) == expected

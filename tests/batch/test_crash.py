"""Jobs whose driver, worker or disk gives up half-way: no row is lost, none is written twice."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import cloudpickle
import dask
import psutil
import pytest
from distributed import Client
from distributed.diagnostics.plugin import WorkerPlugin

from daskserve import EngineConfig, SamplingParams, Service, run_batch
from daskserve.errors import BatchError

# Workers cannot import this module.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

NUM_ROWS = 100
PARAMS = SamplingParams(max_tokens=16)
POISON = [66] * 7


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
    while num_lines(output) < count and (process is None or process.poll() is None):
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


def start_alone(source, output):
    """A job with a cluster of its own, in a process group of its own."""
    arguments = ["--model", "mock", "--max-tokens", "100", "-i", str(source), "-o", str(output)]
    return subprocess.Popen(
        [sys.executable, "-m", "daskserve.cli", "run-batch", *arguments],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )


def check_stopped(process):
    _, message = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "stopped; run the same command again to go on" in message
    assert "Traceback" not in message


@pytest.mark.slow
@pytest.mark.parametrize("delay_s", [0.0, 0.3, 0.6, 1.0, 2.0])
def test_job_stopped_while_its_cluster_starts_says_so(source, tmp_path, delay_s):
    process = start_alone(source, tmp_path / "out.jsonl")
    deadline = time.monotonic() + 30
    while not (tmp_path / "out.jsonl.job" / "manifest.json").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    time.sleep(delay_s)
    os.killpg(process.pid, signal.SIGINT)
    check_stopped(process)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_whole_process_group_stops_in_order(source, tmp_path, number):
    """As Ctrl-C in a terminal does: the workers get it too."""
    output = tmp_path / "out.jsonl"
    process = start_alone(source, output)
    wait_for_lines(process, output, 1)
    os.killpg(process.pid, number)
    check_stopped(process)
    assert 0 < num_lines(output) < NUM_ROWS


@pytest.mark.slow
def test_a_second_signal_ends_the_job_at_once(source, tmp_path):
    output = tmp_path / "out.jsonl"
    process = start_alone(source, output)
    wait_for_lines(process, output, 1)
    workers = psutil.Process(process.pid).children(recursive=True)
    os.killpg(process.pid, signal.SIGINT)
    time.sleep(0.02)
    os.killpg(process.pid, signal.SIGINT)
    check_stopped(process)
    _, alive = psutil.wait_procs(workers, timeout=10)
    assert not alive


@pytest.mark.slow
def test_closed_standard_streams_do_no_harm(service, source, tmp_path, expected):
    """Nothing that is meant for standard error may end up in the output."""
    output = tmp_path / "out.jsonl"
    closed = " ".join([*command(service, source, output), "<&-", ">&-", "2>&-"])
    assert subprocess.run(["sh", "-c", closed], timeout=90).returncode == 0
    assert sorted(output.read_text().splitlines()) == expected


def start_job(pool, service, source, output):
    """A job under way: half of its rows are written."""
    job = pool.submit(run_batch, service, source, output, params=PARAMS, max_in_flight=20)
    wait_for_lines(None, output, NUM_ROWS // 2)
    return job


def test_job_without_instances_stops_and_goes_on(cluster, source, tmp_path, expected):
    output = tmp_path / "out.jsonl"
    with (
        dask.config.set({"daskserve.service.no-instance-timeout-s": 0.5}),
        Client(cluster) as client,
        Service.attach(client, EngineConfig(model="mock")) as service,
        ThreadPoolExecutor(1) as pool,
    ):
        job = start_job(pool, service, source, output)
        client.retire_workers([i.address for i in service.info() if i.role == "DECODE"])
        with pytest.raises(BatchError, match="run the same command again to go on"):
            job.result(60)
    assert output.read_bytes().endswith(b"\n")
    assert set(output.read_text().splitlines()) < set(expected)


@pytest.mark.slow
def test_job_that_finds_no_instance_is_not_complete(cluster, source, tmp_path):
    with (
        dask.config.set({"daskserve.service.no-instance-timeout-s": 0.5}),
        Client(cluster) as client,
        Service.attach(client, EngineConfig(model="mock")) as service,
    ):
        client.retire_workers([i.address for i in service.info()])
        assert service.info() == []
        with pytest.raises(BatchError, match="run the same command again to go on"):
            run_batch(service, source, tmp_path / "out.jsonl", params=PARAMS)


def test_input_changed_while_the_job_runs_is_noticed(service, source, tmp_path):
    output = tmp_path / "out.jsonl"
    with ThreadPoolExecutor(1) as pool:
        job = start_job(pool, service, source, output)
        with source.open("a") as file:
            file.write("\n")
        with pytest.raises(BatchError, match="was changed while the job ran"):
            job.result(60)


def test_job_without_scheduler_stops_and_goes_on(cluster, service, source, tmp_path, expected):
    output = tmp_path / "out.jsonl"
    with Client(cluster) as client, ThreadPoolExecutor(1) as pool:
        doomed = Service.attach(client, EngineConfig(model="mock"))
        job = start_job(pool, doomed, source, output)
        cluster.close()
        with pytest.raises(BatchError, match="the Dask scheduler is gone"):
            job.result(60)
    run_batch(service, source, output, params=PARAMS)
    assert sorted(output.read_text().splitlines()) == expected


@pytest.mark.slow
@pytest.mark.parametrize("role", ["DECODE", "PREFILL"])
def test_killed_worker_loses_and_repeats_no_row(local_service, source, tmp_path, expected, role):
    [address] = [i.address for i in local_service.info() if i.role == role]
    pid = local_service.client.run(os.getpid, workers=[address])[address]
    output = tmp_path / "out.jsonl"
    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(run_batch, local_service, source, output, params=PARAMS, max_in_flight=20)
        wait_for_lines(None, output, NUM_ROWS // 2)
        os.kill(pid, signal.SIGKILL)
        assert job.result(100).num_succeeded == NUM_ROWS
    assert sorted(output.read_text().splitlines()) == expected


class Trap(WorkerPlugin):
    """Kills the decode instance that gets the poisonous prompt."""

    name = "trap"

    def setup(self, worker):
        from daskserve.workers.instance import Instance

        original = Instance.decode

        def trapped(instance, request, *args):
            if list(request.prompt_token_ids) == POISON:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(instance, request, *args)

        Instance.decode = trapped


@pytest.mark.slow
def test_poisonous_row_is_one_error_line(local_service, tmp_path):
    local_service.client.register_plugin(Trap())
    prompts = [f"prompt {i}" for i in range(99)]
    rows = [*prompts[:50], {"prompt": POISON}, *prompts[50:]]
    output = tmp_path / "out.jsonl"
    summary = run_batch(local_service, rows, output, params=PARAMS)
    assert (summary.num_succeeded, summary.num_failed) == (99, 1)
    failed = [line for line in map(json.loads, output.read_text().splitlines()) if line["error"]]
    assert [(f["custom_id"], f["error"]["code"]) for f in failed] == [("row-50", "killed_instance")]


@pytest.mark.slow
def test_job_stops_when_rows_only_kill_and_none_finishes(local_service, tmp_path):
    local_service.client.register_plugin(Trap())
    output = tmp_path / "out.jsonl"
    with (
        dask.config.set({"daskserve.batch.max-lost-rows": 1}),
        pytest.raises(BatchError, match="2 rows were given up with their instances"),
    ):
        run_batch(local_service, [{"prompt": POISON}] * 5, output, params=PARAMS)
    assert output.read_bytes() == b""


def can_mount():
    if shutil.which("unshare") is None:
        return False
    mount = ["unshare", "-rm", "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
    return subprocess.run(mount, capture_output=True).returncode == 0


@pytest.mark.skipif(not can_mount(), reason="no user namespaces to mount a small disk in")
@pytest.mark.slow
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

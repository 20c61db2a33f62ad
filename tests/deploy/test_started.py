"""What is written is run: the job of the target slurm with stand-ins for SLURM's own commands.

`srun` starts its task once per node with another SLURM_NODEID, on this machine; all the rest,
scheduler and workers included, is real.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner
from distributed import Client

from daskserve.cli import main
from daskserve.core.instance import Role
from daskserve.core.placement import GPULocation, InstancePlacement, Parallelism, Placement
from daskserve.planner.placement_file import placement_to_yaml
from daskserve.service.agreement import misplaced_ranks, missing_ranks
from daskserve.service.presence import look_at_worker, presence_of

SRUN = """\
#!/usr/bin/env bash
set -eu
nodes=0
for word in "$@"; do
  case $word in --nodes=*) nodes=${word#--nodes=} ;; esac
done
while [[ $1 == --* ]]; do shift; done
pids=()
trap 'kill -TERM "${pids[@]}" 2>/dev/null || true' TERM
for ((node = 0; node < nodes; node++)); do
  SLURM_NODEID=$node SLURMD_NODENAME=127.0.0.1 "$@" &
  pids+=("$!")
done
for pid in "${pids[@]}"; do while kill -0 "$pid" 2>/dev/null; do wait "$pid" || true; done; done
"""
PLACEMENT = Placement(
    (
        InstancePlacement(
            Role.PREFILL, Parallelism(), (GPULocation(0, 0),), kv_capacity_tokens=3200
        ),
        InstancePlacement(
            Role.DECODE,
            Parallelism(1, 2),
            (GPULocation(0, 1), GPULocation(2, 0)),
            kv_capacity_tokens=6400,
            max_batch_size=4,
        ),
    ),
    gpus_per_node=2,
)


@pytest.fixture
def folder(tmp_path) -> Path:
    """With the job, and the stand-ins in ``bin``."""
    path = tmp_path / "placement.yaml"
    path.write_text(placement_to_yaml(PLACEMENT))
    site = tmp_path / "site.yaml"
    site.write_text("device: cpu\nscheduler_port: 0\nmargin_s: 30\n")
    options = ["--target", "slurm", "--site", str(site), "-o", str(tmp_path / "job")]
    result = CliRunner().invoke(main, ["deploy", str(path), *options])
    assert result.exit_code == 0, result.stderr
    (tmp_path / "bin").mkdir()
    srun = tmp_path / "bin" / "srun"
    srun.write_text(SRUN)
    srun.chmod(0o755)
    return tmp_path


def start(folder: Path, *arguments: str) -> subprocess.Popen:
    own = {
        "PATH": f"{folder / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "7",
        "SLURMD_NODENAME": "127.0.0.1",
        "OMP_NUM_THREADS": "1",
    }
    with (folder / "job.log").open("w") as log:
        return subprocess.Popen(
            ["bash", folder / "job" / "job.sbatch", *arguments],
            env={**os.environ, **own},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def stop(job: subprocess.Popen) -> None:
    """As SLURM does at the end of a job."""
    try:
        job.wait(timeout=60)
    except subprocess.TimeoutExpired:
        os.killpg(job.pid, signal.SIGKILL)
        raise


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_every_rank_starts_on_its_node_and_ends_when_told(folder):
    job = start(folder)
    found = folder / "job" / "scheduler-7.json"
    deadline = time.monotonic() + 100
    while not found.exists() or not found.stat().st_size:
        assert time.monotonic() < deadline, (folder / "job.log").read_text()
        time.sleep(0.2)
    address = json.loads(found.read_text())["address"]
    with Client(address, timeout=60) as client:
        client.wait_for_workers(3, timeout=100)
        answers = client.run(look_at_worker)
        workers = [presence_of(who, answer) for who, answer in answers.items()]
    os.killpg(job.pid, signal.SIGTERM)
    stop(job)
    assert missing_ranks(PLACEMENT, workers) == misplaced_ranks(PLACEMENT, workers) == []
    assert {(w.instance, w.number): (w.node, w.gpu, w.role) for w in workers} == {
        ("prefill-0", 0): (0, 0, Role.PREFILL),
        ("decode-1", 0): (0, 1, Role.DECODE),
        ("decode-1", 1): (2, 0, None),
    }


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_job_with_a_command_answers_every_row_and_ends(folder):
    rows, answers = folder / "rows.jsonl", folder / "answers.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"row {i}"}) + "\n" for i in range(6)))
    model = ["--model", "tiny-random-llama", "--dtype", "float32", "--max-tokens", "6"]
    job = start(folder, "run-batch", "-i", str(rows), "-o", str(answers), *model)
    assert job.wait(timeout=350) == 0, (folder / "job.log").read_text()
    lines = [json.loads(line) for line in answers.read_text().splitlines()]
    assert len(lines) == 6 and all("text" in line for line in lines)

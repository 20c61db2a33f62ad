"""What is written for each target, judged by the programs that read such files."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import kubernetes_validate
import pytest
import yaml
from click.testing import CliRunner

from daskserve.cli import main
from daskserve.errors import ConfigError
from daskserve.planner.placement_file import placement_to_yaml

HOSTS = ("gpu-a", "gpu-b")
IMAGE = {"image": "registry.example/daskserve:1", "claim": "models"}


@pytest.mark.parametrize("target", ["commands", "slurm", "jobqueue"])
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_scripts_are_sound(rendered, tmp_path, target, device):
    files = rendered(
        target, hosts=HOSTS, device=device, model="/models/it's here", cpus_per_rank=2,
        activate=("source /venv/bin/activate",), interface="ib0",
    ).files  # fmt: skip
    scripts = [name for name in files if not name.endswith(".py")]
    for name, text in files.items():
        (tmp_path / name).write_text(text)
        if name.endswith(".py"):
            compile(text, name, "exec")
    for name in scripts:
        subprocess.run(["bash", "-n", tmp_path / name], check=True)
    if shutil.which("shellcheck"):
        ignored = "--exclude=SC1091"  # the environment is not here
        paths = [tmp_path / name for name in scripts]
        checked = subprocess.run(
            ["shellcheck", ignored, *paths], capture_output=True, text=True, check=False
        )
        assert checked.returncode == 0, checked.stdout


def test_a_gpu_is_seen_by_one_worker_and_nothing_is_served_over_http(rendered):
    files = rendered("commands", hosts=HOSTS).files
    assert set(files) == {"scheduler.sh", "node-0.sh", "node-1.sh"}
    starts = files["node-1.sh"].split("start env")[1:]
    assert ["CUDA_VISIBLE_DEVICES=0" in s for s in starts] == [True, False]
    assert "dask cuda worker tcp://gpu-a:8786 --host gpu-b --name decode-2" in starts[1]
    for text in files.values():
        commands = [
            line for line in text.splitlines() if " worker " in line or "scheduler " in line
        ]
        assert all("--dashboard-address 127.0.0.1:0" in line for line in commands[1:])
    assert "HF_HUB_OFFLINE=1" in files["node-0.sh"]


def test_slurm_asks_for_the_nodes_of_the_plan_and_for_a_signal_before_the_end(rendered):
    job = rendered("slurm", slurm={"gres": "gpu:h100", "partition": "llm"}, margin_s=90).files
    head = [line for line in job["job.sbatch"].splitlines() if line.startswith("#SBATCH")]
    for wanted in ("--nodes=2", "--gres=gpu:h100:4", "--signal=TERM@90", "--partition=llm"):
        assert f"#SBATCH {wanted}" in head


def test_the_manifest_is_valid_and_open_to_its_namespace_alone(rendered):
    text = rendered("kubernetes", kubernetes=IMAGE, margin_s=60).files["daskserve.yaml"]
    objects = list(yaml.safe_load_all(text))
    for one in objects:
        kubernetes_validate.validate(one, "1.31", strict=True)
    named = {(one["kind"], one["metadata"]["name"]): one for one in objects}
    assert {name for kind, name in named if kind == "StatefulSet"} == {
        "prefill-0", "decode-1-node0", "decode-1-node1", "decode-2",
    }  # fmt: skip
    services = [one["spec"] for (kind, _), one in named.items() if kind == "Service"]
    assert all(s.get("type", "ClusterIP") == "ClusterIP" for s in services)
    policy = named["NetworkPolicy", "daskserve"]["spec"]
    assert policy["ingress"] == [{"from": [{"podSelector": {}}]}]
    pod = named["StatefulSet", "prefill-0"]["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] == 90
    assert pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == 2
    script = pod["containers"][0]["command"][-1]
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    assert script.count("dask cuda worker tcp://daskserve-scheduler:8786") == 2


def test_what_a_target_lacks_is_named(rendered):
    with pytest.raises(ConfigError, match="nodes up to 1, the site 1 hosts"):
        rendered("commands", hosts=("a",))
    with pytest.raises(ConfigError, match="kubernetes.image"):
        rendered("kubernetes")
    with pytest.raises(ConfigError, match="16.5Gi"):
        rendered("kubernetes", kubernetes={**IMAGE, "memory_per_rank": "16.5Gi"})


def test_dask_jobqueue_makes_jobs_of_the_script(rendered, tmp_path):
    """Its own rendering, in a process of its own: its options are those that it knows."""
    script = tmp_path / "cluster.py"
    script.write_text(rendered("jobqueue", slurm={"walltime": "01:00:00"}).files["cluster.py"])
    code = (
        "import runpy; found = runpy.run_path('cluster.py')\n"
        "made = found['job'](1)\n"
        "options = {**made['options'], 'log_directory': '.'}\n"
        "print(made['cls']('tcp://a:1', name='node-1', **options).job_script())"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    for part in ("-t 01:00:00", "--signal=B:TERM@120", "exec bash /shared/job/node-1.sh"):
        assert part in result.stdout


def test_the_command_writes_files_or_prints_them(placement, tmp_path):
    path = tmp_path / "placement.yaml"
    path.write_text(placement_to_yaml(placement))
    options = ["deploy", str(path), "--target", "slurm", "-o", str(tmp_path / "job")]
    printed = CliRunner().invoke(main, [*options, "--dry-run"])
    assert printed.exit_code == 0 and "# ---- job.sbatch" in printed.stdout
    assert not (tmp_path / "job").exists()
    written = CliRunner().invoke(main, options)
    assert written.exit_code == 0, written.stderr
    names = {file.name for file in Path(tmp_path / "job").iterdir()}
    assert names == {"job.sbatch", "node-0.sh", "node-1.sh", "placement.yaml"}

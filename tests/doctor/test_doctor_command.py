from __future__ import annotations

import json

from click.testing import CliRunner

from daskserve.cli import main
from daskserve.core.instance import Role
from daskserve.core.placement import GPULocation, InstancePlacement, Parallelism, Placement
from daskserve.host.report import HostReport
from daskserve.planner.placement_file import placement_to_yaml


def invoke(*options: str):
    return CliRunner().invoke(main, ["doctor", *options])


def test_this_host_is_described_and_nothing_is_lacking():
    result = invoke("--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    [host] = [HostReport.from_record(one) for one in found["hosts"]]
    assert host.machine.num_cores >= 1 and host.machine.total_bytes > 0
    assert {"python", "daskserve", "distributed"} <= host.versions.keys()
    assert any(one.name == "lo" for one in host.interfaces)
    assert "cores" in invoke().stdout


def test_a_placement_says_what_it_lacks_here(tmp_path):
    path = tmp_path / "placement.yaml"
    gpus = tuple(GPULocation(3, gpu) for gpu in range(16))
    wanted = InstancePlacement(
        Role.COLOCATED, Parallelism(16, 1), gpus, "B200", kv_capacity_tokens=10**8
    )
    path.write_text(placement_to_yaml(Placement((wanted,), 16, "llama-3.1-70b")))
    result = invoke("--placement", str(path))
    assert result.exit_code == 3
    assert "lacking: node 3 needs 16 B200" in result.stdout
    assert "lacking: a rank of colocated-0 needs" in result.stdout


def test_what_cannot_be_read_is_an_error(tmp_path):
    result = invoke("--placement", str(tmp_path / "none.yaml"))
    assert (result.exit_code, "cannot read" in result.stderr) == (1, True)

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from daskserve.core.instance import Role
from daskserve.core.placement import GPULocation, InstancePlacement, Parallelism, Placement
from daskserve.doctor.lacks import (
    lacking_hosts,
    lacking_memory,
    missing_packages,
    rank_bytes,
    slow_links,
)
from daskserve.doctor.tables import host_lines
from daskserve.host.gpus import GPU
from daskserve.host.links import InfiniBand, Interface
from daskserve.host.machine import Machine
from daskserve.host.report import HostReport
from daskserve.planner.model_spec import ModelSpec

LLAMA = ModelSpec.load("llama-3.1-70b")


def host(name: str = "a", num_gpus: int = 8, gpu: str = "NVIDIA H100 80GB HBM3") -> HostReport:
    gpus = (
        GPU(i, gpu, f"GPU-{name}-{i}", int(85e9), int(84e9), 18, "5 x16") for i in range(num_gpus)
    )
    return HostReport(
        machine=Machine(name, "Linux", "EPYC", 64, ("avx2",), int(1e12), int(9e11)),
        rooms=(),
        versions={"torch": "2.13.0", "dask-cuda": "26.8", "distributed-ucxx": "0.46"},
        gpus=tuple(gpus),
        driver="580",
        interfaces=(Interface("lo", ("127.0.0.1",), 0.0, 65536), Interface("eth0", (), 3e9, 1500)),
        infiniband=(InfiniBand("mlx5_0", "1", "4: ACTIVE", "400 Gb/sec (4X NDR)", "InfiniBand"),),
    )


def placement(tp: int = 4, kv: int = 100_000, network: float | None = None) -> Placement:
    def instance(role: Role, node: int) -> InstancePlacement:
        gpus = tuple(GPULocation(node, gpu) for gpu in range(tp))
        return InstancePlacement(role, Parallelism(tp, 1), gpus, "H100", kv_capacity_tokens=kv)

    return Placement((instance(Role.PREFILL, 0), instance(Role.DECODE, 1)), 8, "", network)


def test_hosts_with_the_gpus_of_the_plan_lack_nothing():
    assert lacking_hosts(placement(), [host("a", 4), host("b", 8)]) == []


@pytest.mark.parametrize(
    ("hosts", "part"),
    [
        ([host("a")], "node 1 needs 4 H100: no host is left"),
        ([host("a"), host("b", 2)], "node 1 needs 4 H100: b has 2 NVIDIA H100 80GB HBM3"),
        ([host("a"), host("b", 8, "NVIDIA A100")], "b has 8 NVIDIA A100"),
        ([host("a"), host("b", 0)], "b has no GPUs"),
    ],
)
def test_a_node_that_no_host_can_be_is_named(hosts, part):
    [lack] = lacking_hosts(placement(), hosts)
    assert part in lack


def test_a_rank_needs_room_for_its_part_of_weights_and_kv():
    instance = placement(tp=2, kv=10_000).instances[0]
    whole = LLAMA.weight_bytes + 10_000 * LLAMA.kv_bytes_per_token
    assert rank_bytes(instance, LLAMA) == pytest.approx(whole / 2)
    assert lacking_memory(placement(tp=4), LLAMA, [host()]) == []
    for hosts in ([host()], []):  # as it is here, else by the data sheet
        lacks = lacking_memory(placement(tp=1), LLAMA, hosts)
        assert len(lacks) == 2 and "a rank of prefill-0 needs" in lacks[0]


def test_a_link_slower_than_planned_is_named_with_both_speeds():
    fast, slow = host("a"), replace(host("b"), infiniband=())
    lacks = slow_links(placement(network=25e9), [fast, slow])
    assert lacks == [
        "b: its fastest link, eth0, carries 3.00 GB/s; the placement was planned with 25.00 GB/s"
        " between nodes"
    ]
    assert slow_links(placement(network=1e9), [fast, slow]) == []


def test_packages_are_missed_only_where_the_hardware_is():
    bare = replace(host("b", 0), versions={"torch": "2.13.0"}, infiniband=())
    assert missing_packages([bare, host("a")]) == []
    without = replace(host("a"), versions={})
    assert [n.split(":")[1].split(",")[0] for n in missing_packages([without])] == [
        " no torch",
        " GPUs",
        " InfiniBand",
    ]


def test_a_report_travels_as_json_and_has_a_line_for_everything():
    report = host("a", 1)
    assert HostReport.from_record(json.loads(json.dumps(report.to_record()))) == report
    text = "\n".join(host_lines(report))
    for part in ("NVIDIA H100", "18 NVLinks", "PCIe 5 x16", "mlx5_0/1", "missing     ucxx"):
        assert part in text

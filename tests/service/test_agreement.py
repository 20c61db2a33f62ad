"""Who can work together, and whether what runs is what was placed: no cluster needed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from daskserve.core.instance import Role
from daskserve.core.placement import GPULocation, InstancePlacement, Parallelism, Placement
from daskserve.service.agreement import (
    doubtful_versions,
    misplaced_ranks,
    missing_ranks,
    refused_versions,
    unlike,
)
from daskserve.service.presence import Presence

VERSIONS = {"python": "3.11.7", "daskserve": "0.1.0", "distributed": "2026.8.0", "torch": "2.13.0"}
PLACEMENT = Placement(
    (
        InstancePlacement(Role.PREFILL, Parallelism(), (GPULocation(0, 0),), "H100"),
        InstancePlacement(
            Role.DECODE, Parallelism(1, 2), (GPULocation(0, 1), GPULocation(1, 0)), "H100"
        ),
    ),
    gpus_per_node=2,
)


def process(who: str, **facts) -> Presence:
    return Presence(who, **{"host": "h", "versions": VERSIONS, "wire": "abc", **facts})


def worker(instance: str, number: int, **facts) -> Presence:
    index = ("prefill-0", "decode-1").index(instance)
    place = PLACEMENT.instances[index].gpus[number]
    role = PLACEMENT.instances[index].role if number == 0 else None
    own = {"instance": instance, "number": number, "role": role, "pp": 1 + index}
    own |= {"node": place.node, "gpu": place.gpu, "host": f"host-{place.node}"}
    return process(f"tcp://{instance}.{number}", **{**own, **facts})


def all_ranks() -> list[Presence]:
    return [worker("prefill-0", 0), worker("decode-1", 0), worker("decode-1", 1)]


def test_equal_processes_agree():
    processes = [process("client"), process("scheduler"), *all_ranks()]
    assert refused_versions(processes) == doubtful_versions(processes) == []


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        (
            {"wire": "xyz"},
            "daskserve differs: 0.1.0 (code abc) on client, scheduler; 0.1.0 (code xyz) on tcp://w",
        ),
        (
            {"versions": {**VERSIONS, "distributed": "2026.9.0"}},
            "distributed differs: 2026.8.0 on client, scheduler; 2026.9.0 on tcp://w",
        ),
        (
            {"versions": {**VERSIONS, "python": "3.12.1"}},
            "python differs: 3.11 on client, scheduler; 3.12 on tcp://w",
        ),
        (
            {"error": "daskserve is not installed there"},
            "tcp://w: daskserve is not installed there",
        ),
    ],
)
def test_what_breaks_things_is_refused_with_all_values(facts, reason):
    processes = [process("client"), process("scheduler"), process("tcp://w", **facts)]
    assert refused_versions(processes) == [reason]


def test_another_torch_is_refused_within_an_instance_and_doubtful_between_them():
    other = {**VERSIONS, "torch": "2.14.0"}
    within = [worker("decode-1", 0), worker("decode-1", 1, versions=other)]
    assert refused_versions(within) == [
        "torch among the ranks of decode-1 differs: 2.13.0 on tcp://decode-1.0;"
        " 2.14.0 on tcp://decode-1.1"
    ]
    between = [worker("prefill-0", 0, versions=other), worker("decode-1", 0)]
    assert refused_versions(between) == []
    assert doubtful_versions(between) == [
        "torch differs: 2.14.0 on tcp://prefill-0.0; 2.13.0 on tcp://decode-1.0"
    ]


@pytest.mark.parametrize(
    ("name", "value"), [("dtype", "float32"), ("block_size", 32), ("model_digest", "d2")]
)
def test_an_instance_with_another_model_may_not_join(name, value):
    info = {"dtype": "bfloat16", "block_size": 16, "model_digest": "d1"}
    assert unlike(info, {"tcp://a": dict(info)}) == ""
    difference = unlike({**info, name: value}, {"tcp://a": info})
    assert difference == f"{name}={value} here, {info[name]} on tcp://a"


def test_missing_ranks_are_named_with_their_place():
    assert missing_ranks(PLACEMENT, all_ranks()) == misplaced_ranks(PLACEMENT, all_ranks()) == []
    assert missing_ranks(PLACEMENT, all_ranks()[:2]) == ["rank 1 of decode-1 (node 1, GPU 0)"]


@pytest.mark.parametrize(
    ("changed", "part"),
    [
        (worker("decode-1", 1, pp=1, tp=2), "was started as TP2xPP1, placed as TP1xPP2"),
        (worker("decode-1", 1, role=Role.DECODE), "carries the role DECODE, placed as none"),
        (worker("decode-1", 1, gpu=1), "for node 1, GPU 1; placed on node 1, GPU 0"),
        (worker("decode-1", 1, gpu_name="NVIDIA A100-SXM4"), "A100-SXM4, placed on H100"),
        (worker("decode-1", 1, error="it does not answer"), "tcp://decode-1.1: it does not answer"),
        (worker("prefill-0", 0), "several workers are rank 0 of prefill-0"),
        (
            replace(worker("prefill-0", 0), instance="prefill-7"),
            "as prefill-7, which the placement does not have",
        ),
        (
            worker("decode-1", 1, node=0, host="host-9"),
            "node 0 of the placement is spread over the hosts host-0, host-9",
        ),
    ],
)
def test_what_runs_elsewhere_or_otherwise_is_named(changed, part):
    problems = misplaced_ranks(PLACEMENT, [*all_ranks()[:2], changed])
    assert any(part in problem for problem in problems), problems


def test_two_ranks_on_one_gpu_are_found():
    ranks = [replace(r, gpu_uuid="GPU-1", host="host-0", node=0) for r in all_ranks()[:2]]
    assert misplaced_ranks(PLACEMENT, ranks) == [
        "one GPU of host-0 is used by rank 0 of prefill-0 (tcp://prefill-0.0),"
        " rank 0 of decode-1 (tcp://decode-1.0)"
    ]

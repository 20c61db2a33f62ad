from __future__ import annotations

import pytest

from daskserve.core.instance import Role
from daskserve.core.placement import GPULocation, InstancePlacement, Parallelism, Placement
from daskserve.errors import InvalidParameter


def instance(role, *gpus, tp=1, pp=1):
    return InstancePlacement(role, Parallelism(tp, pp), tuple(GPULocation(*g) for g in gpus))


def test_used_and_occupied_gpus_differ():
    prefill = instance(Role.PREFILL, (0, 0), (0, 1), (1, 0), (1, 1), tp=2, pp=2)
    decode = instance(Role.DECODE, (0, 2))
    placement = Placement((prefill, decode), gpus_per_node=8)
    assert (placement.num_gpus_used, placement.num_gpus_occupied) == (5, 16)
    assert placement.num_instances(Role.PREFILL) == 1
    assert prefill.stage_gpus(1) == (GPULocation(1, 0), GPULocation(1, 1))
    assert prefill.nodes == (0, 1)


def test_instances_are_numbered_through_prefill_first():
    decode, prefill = instance(Role.DECODE, (0, 0)), instance(Role.PREFILL, (0, 1))
    placement = Placement((decode, prefill, instance(Role.DECODE, (1, 0))), gpus_per_node=2)
    assert placement.names == ("decode-1", "prefill-0", "decode-2")


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Parallelism(0, 1), "tp=0"),
        (lambda: Parallelism(True, 1), "tp=True"),
        (lambda: instance(Role.DECODE, (0, 0), tp=2), "must name 2 GPUs"),
        (lambda: Placement((), 8), "at least one instance"),
        (lambda: Placement((instance(Role.DECODE, (0, 0)),), 8), "both or neither"),
        (lambda: Placement((instance(Role.COLOCATED, (0, 8)),), 8), "nodes have 8 GPUs"),
        (lambda: Placement((instance(Role.COLOCATED, (0, 1)),) * 2, 8), "belongs to 2 ranks"),
    ],
)
def test_impossible_placements(build, message):
    with pytest.raises(InvalidParameter, match=message):
        build()

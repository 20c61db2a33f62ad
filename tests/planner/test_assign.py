from __future__ import annotations

from collections import Counter
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daskserve.core.instance import Role
from daskserve.core.placement import Parallelism
from daskserve.errors import ClusterError, ConfigError
from daskserve.planner.hardware import GPUS, Cluster, NodeGroup
from daskserve.planner.latency import Roofline
from daskserve.planner.model_spec import ModelSpec
from daskserve.planner.placement_file import placement_from_yaml, placement_to_yaml
from daskserve.planner.search.assign import assign
from daskserve.planner.search.links import kv_traffic
from daskserve.planner.search.units import Instances, Unit

MODEL = ModelSpec.load("llama-3.1-8b")


@cache
def step_times(gpu, parallelism):
    return Roofline().step_times(MODEL, GPUS[gpu], parallelism)


def unit_of(*groups, num_segments=0, gpu="H100"):
    instances = (Instances(role, Parallelism(tp, pp), n, gpu) for role, n, tp, pp in groups)
    return Unit(tuple(instances), num_segments)


def placed(cluster, unit, num_units=1):
    times = {
        Instances(g.role, g.parallelism, 1, g.gpu): step_times(g.gpu, g.parallelism)
        for g in unit.groups
    }
    return assign(cluster, unit, num_units, times, MODEL.name)


def test_segments_of_a_stage_share_a_node():
    unit = unit_of((Role.PREFILL, 5, 1, 2), (Role.DECODE, 1, 2, 2), num_segments=2)
    placement = placed(Cluster.of("H100", 10), unit, 5)
    assert (placement.num_gpus_used, placement.num_gpus_occupied) == (70, 80)
    for start in range(0, len(placement.instances), 6):
        members = placement.instances[start : start + 6]
        for stage in range(2):
            assert len({gpu.node for i in members for gpu in i.stage_gpus(stage)}) == 1


def test_small_units_share_their_nodes():
    unit = unit_of((Role.PREFILL, 1, 2, 1), (Role.DECODE, 1, 2, 1), num_segments=1)
    placement = placed(Cluster.of("H100", 2), unit, 4)
    assert placement.num_gpus_occupied == placement.num_gpus_used == 16


def test_pipelines_inside_a_segment():
    unit = unit_of((Role.PREFILL, 1, 1, 4), (Role.DECODE, 1, 2, 2), num_segments=2)
    placement = placed(Cluster.of("H100", 2), unit)
    prefill = placement.of_role(Role.PREFILL)[0]
    assert [gpu.node for gpu in prefill.gpus] == [0, 0, 1, 1]


@given(
    st.integers(1, 6),
    st.integers(1, 6),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2, 4]),
)
def test_ranks_are_whole_and_tensor_groups_stay_in_a_node(n, m, tp, pp, decode_tp):
    unit = unit_of((Role.PREFILL, n, tp, pp), (Role.DECODE, m, decode_tp, 1))
    placement = placed(Cluster.of("H100", 64), unit)
    assert placement.num_gpus_used == unit.num_gpus
    owners = Counter(gpu for i in placement.instances for gpu in i.gpus)
    assert max(owners.values()) == 1
    for instance in placement.instances:
        for stage in range(instance.parallelism.pp):
            assert len({gpu.node for gpu in instance.stage_gpus(stage)}) == 1
        if instance.parallelism.num_gpus <= 8:
            assert len(instance.nodes) == 1
        assert instance.kv_capacity_tokens > 0 and instance.max_batch_size > 0


def test_phases_on_different_gpus():
    cluster = Cluster((NodeGroup(GPUS["H100"], 1, 8), NodeGroup(GPUS["L40S"], 2, 4)))
    groups = (
        Instances(Role.PREFILL, Parallelism(2), 2, "H100"),
        Instances(Role.DECODE, Parallelism(2), 3, "L40S"),
    )
    placement = placed(cluster, Unit(groups))
    assert {i.gpu_type for i in placement.of_role(Role.DECODE)} == {"L40S"}
    assert min(n for i in placement.of_role(Role.DECODE) for n in i.nodes) == 1


def test_too_small_clusters_say_what_is_missing():
    unit = unit_of((Role.PREFILL, 3, 2, 1), (Role.DECODE, 2, 4, 1))
    with pytest.raises(ClusterError, match="needs 14 H100, the cluster has 8"):
        placed(Cluster.of("H100", 1), unit)
    with pytest.raises(ClusterError, match="cannot leave its node"):
        placed(
            Cluster.of("H100", 4, gpus_per_node=3),
            unit_of((Role.PREFILL, 3, 2, 1), (Role.DECODE, 3, 2, 1)),
        )


def test_kv_crosses_the_network_only_between_nodes():
    cluster = Cluster.of("H100", 4, network_gbps=25)
    together = unit_of((Role.PREFILL, 1, 4, 1), (Role.DECODE, 1, 4, 1), num_segments=1)
    assert kv_traffic(placed(cluster, together), cluster, 100.0, 168e6).fits
    apart = unit_of((Role.PREFILL, 1, 8, 1), (Role.DECODE, 1, 8, 1))
    traffic = kv_traffic(placed(cluster, apart), cluster, 25.0, 168e6)
    assert traffic.busiest_node_bytes_per_s == pytest.approx(4.2e9, rel=0.01)
    assert not traffic.fits and "4.20 GB/s" in str(traffic) and "25 Gbit/s" in str(traffic)


def test_yaml_round_trip():
    unit = unit_of((Role.PREFILL, 2, 2, 2), (Role.DECODE, 1, 4, 1))
    placement = placed(Cluster.of("H100", 3, network_gbps=100), unit)
    text = placement_to_yaml(placement, "two lines\nof comment")
    assert text.startswith("# two lines\n# of comment\n")
    assert placement_from_yaml(text) == placement


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("gpus_per_node", "gpus_per_nod"), "did you mean gpus_per_node"),
        (("role: PREFILL", "role: PREFIL"), "'PREFIL' is not a valid Role"),
        (("tp: 2", "tp: 0"), "tp=0"),
        (("tp: 2", "tp: two"), "instances.0.tp"),
        (("max_batch_size", "max_batch"), "did you mean max_batch_size"),
        (("version: 1", "version: 2"), "version 2"),
        (("- [0, 0]", "- 3"), "instances.0.gpus"),
    ],
)
def test_bad_files_say_where(change, message):
    unit = unit_of((Role.PREFILL, 1, 2, 1), (Role.DECODE, 1, 2, 1))
    text = placement_to_yaml(placed(Cluster.of("H100"), unit))
    with pytest.raises(ConfigError, match=message):
        placement_from_yaml(text.replace(*change))
    with pytest.raises(ConfigError, match="must be a mapping"):
        placement_from_yaml("[]")

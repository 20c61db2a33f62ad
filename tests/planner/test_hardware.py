from __future__ import annotations

import math

import pytest

from daskserve.errors import ClusterError, InvalidParameter
from daskserve.planner.hardware import GPUS, Cluster, NodeGroup, gpu_named, this_cpu


def test_ridge_points_of_the_paper():
    assert round(GPUS["A100"].ridge_flops_per_byte) == 156
    assert round(GPUS["H100"].ridge_flops_per_byte) == 295


def test_this_cpu_is_one_core():
    core = this_cpu()
    assert core.memory_bytes > 2**28 and core.flops > 1e9


def test_unknown_gpu_lists_the_known():
    with pytest.raises(ClusterError, match="'V100': known are A100, H100, H200, B200, L40S, CPU"):
        gpu_named("V100")


def test_cluster_counts_and_prices():
    cluster = Cluster((NodeGroup(GPUS["H100"], 2, 8), NodeGroup(GPUS["L40S"], 3, 4)))
    assert cluster.num_gpus == 28
    assert cluster.price_per_hour == 16 * 3.0 + 12 * 1.0
    assert cluster.first_node(cluster.group_of("L40S")) == 2
    with pytest.raises(ClusterError, match="no A100: it has H100, L40S"):
        cluster.group_of("A100")


@pytest.mark.parametrize("value", [0, -1, math.nan])
def test_links_must_have_bandwidth(value):
    with pytest.raises(InvalidParameter, match="network_bandwidth"):
        Cluster.of("A100", network_gbps=value)


@pytest.mark.parametrize("value", [0, -2, 1.5, True])
def test_nodes_come_whole(value):
    with pytest.raises(InvalidParameter, match="num_nodes"):
        Cluster.of("A100", value)

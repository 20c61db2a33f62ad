"""Can the network carry the KV? The number that decides between Algorithms 1 and 3."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from daskserve.core.instance import Role
from daskserve.core.placement import Placement
from daskserve.planner.hardware import GBPS, Cluster

USABLE_SHARE = 0.8
"""Above this share of a link its transfers queue behind each other."""


@dataclass(frozen=True, slots=True)
class KVTraffic:
    """KV that crosses the network at a rate.

    Parameters
    ----------
    busiest_node_bytes_per_s
        The most that one node sends or receives.
    instance_bytes_per_s
        What one prefill instance ships at its share of the rate.
    network_bandwidth
        Bytes/s of one node, each way.
    """

    busiest_node_bytes_per_s: float
    instance_bytes_per_s: float
    network_bandwidth: float

    @property
    def fits(self) -> bool:
        return self.busiest_node_bytes_per_s <= USABLE_SHARE * self.network_bandwidth

    def __str__(self) -> str:
        verdict = "fits" if self.fits else "does not fit"
        return (
            f"the busiest node moves {self.busiest_node_bytes_per_s / 1e9:.2f} GB/s of KV between"
            f" nodes ({self.instance_bytes_per_s / 1e9:.2f} GB/s per prefill instance), which"
            f" {verdict} in {USABLE_SHARE:.0%} of {self.network_bandwidth / GBPS:g} Gbit/s"
            f" ({self.network_bandwidth / 1e9:.1f} GB/s)"
        )


def kv_traffic(
    placement: Placement, cluster: Cluster, rate: float, kv_bytes_per_request: float
) -> KVTraffic:
    """KV between nodes when requests spread evenly over all instances of a phase.

    A stage's KV goes to the decode ranks of the same layers; here it is taken to go to every
    node in proportion to its decode GPUs.
    """
    prefill = placement.of_role(Role.PREFILL)
    decode = placement.of_role(Role.DECODE)
    if not prefill:
        return KVTraffic(0.0, 0.0, cluster.network_bandwidth)
    per_instance = rate / len(prefill) * kv_bytes_per_request
    made: dict[int, float] = defaultdict(float)
    taken: dict[int, float] = defaultdict(float)
    for instance in prefill:
        for location in instance.gpus:
            made[location.node] += per_instance / len(instance.gpus)
    for instance in decode:
        for location in instance.gpus:
            taken[location.node] += rate * kv_bytes_per_request / len(decode) / len(instance.gpus)
    total = rate * kv_bytes_per_request
    busiest = 0.0
    if total > 0:
        for node in {*made, *taken}:
            sent = made[node] * (1.0 - taken[node] / total)
            received = taken[node] * (1.0 - made[node] / total)
            busiest = max(busiest, sent, received)
    return KVTraffic(busiest, per_instance, cluster.network_bandwidth)

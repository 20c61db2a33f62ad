"""KV that moved between instances, as Prometheus counters that live on the workers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from daskserve.service.kv_counters import Pulled, is_same_host

_LABELS = ("rank", "same_host")


class KVMetrics(Collector):
    """Bytes and pulls of every rank, apart by whether they came from its own host."""

    def __init__(self, prefix: str, registry: CollectorRegistry) -> None:
        self._prefix = prefix
        self._pulled: Mapping[str, Mapping[str, Pulled]] = {}
        registry.register(self)

    def set(self, pulled: Mapping[str, Mapping[str, Pulled]]) -> None:
        """What each rank has pulled, by address of the rank and of the holder."""
        self._pulled = pulled

    def collect(self) -> Iterator[CounterMetricFamily]:
        num_bytes = CounterMetricFamily(
            f"{self._prefix}kv_pulled_bytes", "Bytes of KV that a rank pulled.", labels=_LABELS
        )
        num_pulls = CounterMetricFamily(
            f"{self._prefix}kv_pulls", "Pulls that brought them.", labels=_LABELS
        )
        for rank, of_holder in self._pulled.items():
            for is_same in (True, False):
                held = [p for h, p in of_holder.items() if is_same_host(rank, h) is is_same]
                labels = (rank, str(is_same).lower())
                num_bytes.add_metric(labels, sum(pulled.num_bytes for pulled in held))
                num_pulls.add_metric(labels, sum(pulled.num_pulls for pulled in held))
        yield num_bytes
        yield num_pulls

"""Which ways of splitting a model an algorithm may try."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from daskserve.core.instance import Role
from daskserve.core.placement import Parallelism
from daskserve.errors import InvalidParameter
from daskserve.planner.search.units import Evaluator, Instances, Unit


@dataclass(frozen=True, slots=True)
class SearchSpace:
    """Nodes of one GPU type.

    Parameters
    ----------
    nodes_per_instance
        N of the paper: most nodes that one instance may span.
    gpus_per_node
        M of the paper. Tensor-parallel groups never leave a node.
    """

    nodes_per_instance: int
    gpus_per_node: int
    gpu: str = ""

    def __post_init__(self) -> None:
        for name in ("nodes_per_instance", "gpus_per_node"):
            if getattr(self, name) < 1:
                raise InvalidParameter(name, getattr(self, name), "must be at least 1")

    def parallelisms(self, evaluator: Evaluator) -> Iterator[Parallelism]:
        """Every split that fits, in the order of Algorithm 1: TP outside, PP inside."""
        most = self.nodes_per_instance * self.gpus_per_node
        for tp in range(1, self.gpus_per_node + 1):
            for pp in range(1, most // tp + 1):
                if evaluator.fits(self.gpu, Parallelism(tp, pp)):
                    yield Parallelism(tp, pp)

    def segments(self, evaluator: Evaluator, pp: int) -> list[int]:
        """``get_intra_node_configs``: TP degrees of one stage per node."""
        degrees = range(1, self.gpus_per_node + 1)
        return [tp for tp in degrees if evaluator.fits(self.gpu, Parallelism(tp, pp))]

    def phase_units(self, evaluator: Evaluator, role: Role) -> list[Unit]:
        """One instance of one role in every split."""
        return [
            Unit((Instances(role, parallelism, 1, self.gpu),))
            for parallelism in self.parallelisms(evaluator)
        ]

    def paired_units(self, evaluator: Evaluator) -> list[Unit]:
        """One prefill and one decode instance, stage by stage on the same nodes (Algorithm 2)."""
        found = []
        for pp in range(1, self.nodes_per_instance + 1):
            degrees = self.segments(evaluator, pp)
            for prefill in degrees:
                for decode in degrees:
                    if prefill + decode <= self.gpus_per_node:
                        found.append(self.unit(pp, prefill, 1, decode, 1))
        return found

    def mixed_units(self, evaluator: Evaluator) -> list[Unit]:
        """Any numbers of prefill and decode instances that share their nodes (Algorithm 3)."""
        found = []
        for pp in range(1, self.nodes_per_instance + 1):
            degrees = self.segments(evaluator, pp)
            for prefill in degrees:
                for decode in degrees:
                    found += self._ratios(pp, prefill, decode)
        return found

    def _ratios(self, pp: int, prefill: int, decode: int) -> list[Unit]:
        most = self.gpus_per_node
        return [
            self.unit(pp, prefill, num_prefill, decode, num_decode)
            for num_prefill in range(1, most // prefill + 1)
            for num_decode in range(1, (most - num_prefill * prefill) // decode + 1)
        ]

    def joint_units(self, evaluator: Evaluator) -> list[Unit]:
        """One prefill and one decode instance whose segments, pipelines too, share nodes."""
        found = []
        for num_segments in range(1, self.nodes_per_instance + 1):
            inner = [
                split
                for split in _splits_of_a_node(self.gpus_per_node)
                if evaluator.fits(self.gpu, Parallelism(split.tp, split.pp * num_segments))
            ]
            for prefill in inner:
                for decode in inner:
                    if prefill.num_gpus + decode.num_gpus <= self.gpus_per_node:
                        found.append(self._joint_unit(num_segments, prefill, decode))
        return found

    def _joint_unit(self, num_segments: int, prefill: Parallelism, decode: Parallelism) -> Unit:
        roles = ((Role.PREFILL, prefill), (Role.DECODE, decode))
        groups = tuple(
            Instances(role, Parallelism(inner.tp, inner.pp * num_segments), 1, self.gpu)
            for role, inner in roles
        )
        return Unit(groups, num_segments)

    def unit(self, pp: int, prefill: int, num_prefill: int, decode: int, num_decode: int) -> Unit:
        """Segments of ``prefill`` and ``decode`` GPUs on each of ``pp`` nodes."""
        groups = (
            Instances(Role.PREFILL, Parallelism(prefill, pp), num_prefill, self.gpu),
            Instances(Role.DECODE, Parallelism(decode, pp), num_decode, self.gpu),
        )
        return Unit(groups, num_segments=pp)


def _splits_of_a_node(num_gpus: int) -> list[Parallelism]:
    return [
        Parallelism(tp, pp) for tp in range(1, num_gpus + 1) for pp in range(1, num_gpus // tp + 1)
    ]

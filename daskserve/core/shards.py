"""What each rank of an instance of several workers holds, and who has what another rank needs.

Rank ``stage * tp + tp_rank`` holds the layers of its pipeline stage and, of each, the KV heads of
its tensor-parallel rank: contiguous ranges, so that the common part of two ranks of unlike shapes
is one range of layers times one range of heads.
"""

from __future__ import annotations

from dataclasses import dataclass

from daskserve.core.placement import Parallelism
from daskserve.errors import InvalidParameter


@dataclass(frozen=True, slots=True)
class Shard:
    """Layers ``first_layer .. first_layer + num_layers``, and KV heads counted likewise."""

    first_layer: int
    num_layers: int
    first_head: int
    num_heads: int

    @property
    def layers(self) -> range:
        return range(self.first_layer, self.first_layer + self.num_layers)

    @property
    def heads(self) -> range:
        return range(self.first_head, self.first_head + self.num_heads)

    def common(self, other: Shard) -> Shard | None:
        """What both hold; None if that is nothing."""
        layers = _common(self.layers, other.layers)
        heads = _common(self.heads, other.heads)
        if not layers or not heads:
            return None
        return Shard(layers.start, len(layers), heads.start, len(heads))

    def within(self, whole: Shard) -> tuple[slice, slice]:
        """Where its layers and its heads are in arrays of those of ``whole``."""
        layer, head = self.first_layer - whole.first_layer, self.first_head - whole.first_head
        return slice(layer, layer + self.num_layers), slice(head, head + self.num_heads)


@dataclass(frozen=True, slots=True)
class Piece:
    """A slice of KV that rank ``rank`` of another instance holds."""

    rank: int
    shard: Shard


@dataclass(frozen=True, slots=True)
class ShardMap:
    """How the layers and KV heads of a model are shared out among the ranks of an instance.

    Parameters
    ----------
    parallelism
        Shape of the instance.
    num_layers, num_heads, num_kv_heads
        Of the whole model.
    stage_layers
        Layers of each stage; empty: as equal as can be.

    Raises
    ------
    InvalidParameter
        TP does not divide the heads, there are more stages than layers, or the layers of the
        stages are not those of the model.
    """

    parallelism: Parallelism
    num_layers: int
    num_heads: int
    num_kv_heads: int
    stage_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        tp, pp = self.parallelism.tp, self.parallelism.pp
        for name, count in (("attention", self.num_heads), ("KV", self.num_kv_heads)):
            if count % tp:
                limit = f"must divide the model's {count} {name} heads"
                raise InvalidParameter("tp", tp, limit)
        if pp > self.num_layers:
            limit = f"must be at most the model's {self.num_layers} layers"
            raise InvalidParameter("pp", pp, limit)
        if not self.stage_layers:
            object.__setattr__(self, "stage_layers", balanced_layers(self.num_layers, pp))
        sizes = self.stage_layers
        if len(sizes) != pp or sum(sizes) != self.num_layers or min(sizes) < 1:
            limit = f"must be {pp} numbers from 1 on with a sum of {self.num_layers}"
            raise InvalidParameter("stage_layers", sizes, limit)

    @property
    def num_ranks(self) -> int:
        return self.parallelism.num_gpus

    def stage_of(self, rank: int) -> int:
        return rank // self.parallelism.tp

    def tp_rank_of(self, rank: int) -> int:
        return rank % self.parallelism.tp

    def of_rank(self, rank: int) -> Shard:
        """The layers and KV heads of a rank."""
        if not 0 <= rank < self.num_ranks:
            raise InvalidParameter("rank", rank, f"must be 0..{self.num_ranks - 1}")
        stage, num_heads = self.stage_of(rank), self.num_kv_heads // self.parallelism.tp
        first, count = sum(self.stage_layers[:stage]), self.stage_layers[stage]
        return Shard(first, count, self.tp_rank_of(rank) * num_heads, num_heads)

    def pieces_for(self, shard: Shard) -> tuple[Piece, ...]:
        """What each rank here has of ``shard``, every part of it once: one piece a rank."""
        held = ((rank, self.of_rank(rank).common(shard)) for rank in range(self.num_ranks))
        return tuple(Piece(rank, common) for rank, common in held if common is not None)


def balanced_layers(num_layers: int, num_stages: int, last_extra: float = 0.0) -> tuple[int, ...]:
    """Layers of each stage, so that the longest is as short as can be; the first has the most.

    ``last_extra`` is what the last stage does besides, as many layers would take as long.
    """
    if num_stages == 1:
        return (num_layers,)
    others = num_stages - 1

    def longest(last: int) -> float:
        return max(-(-(num_layers - last) // others), last + last_extra)

    last = 1
    while (last + 1) * num_stages <= num_layers and longest(last + 1) <= longest(last):
        last += 1
    edges = [-(-(num_layers - last) * edge // others) for edge in range(num_stages)]
    return (*(end - first for first, end in zip(edges, edges[1:], strict=False)), last)


def _common(first: range, second: range) -> range:
    return range(max(first.start, second.start), min(first.stop, second.stop))

"""How many instances have which role."""

from __future__ import annotations

import re
from dataclasses import dataclass

from daskserve.core.instance import Role
from daskserve.core.placement import Parallelism
from daskserve.errors import InvalidParameter


@dataclass(frozen=True, slots=True, order=True)
class Split:
    """Prefill and decode instances, all of one shape.

    Parameters
    ----------
    num_prefill, num_decode
        At least one each.
    """

    num_prefill: int
    num_decode: int
    shape: Parallelism = Parallelism()

    def __post_init__(self) -> None:
        for name in ("num_prefill", "num_decode"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InvalidParameter(name, value, "must be a whole number of at least 1")

    @classmethod
    def parse(cls, text: str) -> Split:
        """What `str` wrote, as ``2P1D`` or ``2P1D(TP2xPP1)`` (InvalidParameter)."""
        match = re.fullmatch(r"(\d+)P(\d+)D(?:\(TP(\d+)xPP(\d+)\))?", text)
        if match is None:
            raise InvalidParameter("split", text, "must be like 2P1D or 2P1D(TP2xPP1)")
        prefill, decode, tp, pp = match.groups()
        return cls(int(prefill), int(decode), Parallelism(int(tp or 1), int(pp or 1)))

    @property
    def num_instances(self) -> int:
        return self.num_prefill + self.num_decode

    @property
    def num_gpus(self) -> int:
        return self.num_instances * self.shape.num_gpus

    def count(self, role: Role) -> int:
        return {Role.PREFILL: self.num_prefill, Role.DECODE: self.num_decode}.get(role, 0)

    def flips_from(self, other: Split) -> int:
        """Instances that must change their role to come here from ``other`` of equal size."""
        return abs(self.num_prefill - other.num_prefill)

    def same_size(self) -> list[Split]:
        """Every split of as many instances of this shape, this one included."""
        return [
            Split(num_prefill, self.num_instances - num_prefill, self.shape)
            for num_prefill in range(1, self.num_instances)
        ]

    def __str__(self) -> str:
        shape = "" if self.shape == Parallelism() else f"({self.shape})"
        return f"{self.num_prefill}P{self.num_decode}D{shape}"

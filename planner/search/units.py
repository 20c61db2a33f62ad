"""What a search chooses between: a unit of instances that is replicated as a whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from daskserve.core.instance import Role
from daskserve.core.placement import Parallelism


@dataclass(frozen=True, slots=True, order=True)
class Instances:
    """``count`` instances that are alike."""

    role: Role
    parallelism: Parallelism
    count: int = 1
    gpu: str = ""

    @property
    def num_gpus(self) -> int:
        return self.count * self.parallelism.num_gpus

    def __str__(self) -> str:
        split = self.parallelism
        return f"{self.count}{self.role[0]}(TP{split.tp},PP{split.pp})"


@dataclass(frozen=True, slots=True, order=True)
class Unit:
    """Instances that work together: prefill, decode, both, or colocated.

    Parameters
    ----------
    num_segments
        Nodes over which the unit is cut: same-stage segments share a node, so that KV stays on
        its links (Algorithms 2 and 3). 0: the instances may be anywhere.
    chunk_tokens
        Colocated only: chunked prefill with this many tokens per mixed step; 0 runs whole
        prompts first.
    """

    groups: tuple[Instances, ...]
    num_segments: int = 0
    chunk_tokens: int = 0

    @property
    def num_gpus(self) -> int:
        return sum(group.num_gpus for group in self.groups)

    def of_role(self, role: Role) -> Instances | None:
        """The group of a role, None without one."""
        return next((group for group in self.groups if group.role is role), None)

    def times(self, factor: int) -> Unit:
        """The unit with every count multiplied."""
        groups = tuple(
            Instances(g.role, g.parallelism, g.count * factor, g.gpu) for g in self.groups
        )
        return Unit(groups, self.num_segments, self.chunk_tokens)

    def __str__(self) -> str:
        """Such as ``6P(TP1,PP2) + 1D(TP2,PP2) on H100``; C stands for colocated."""
        kinds = list(dict.fromkeys(group.gpu for group in self.groups if group.gpu))
        parts = [f"{group}{f' on {group.gpu}' if len(kinds) > 1 else ''}" for group in self.groups]
        chunks = f" chunks of {self.chunk_tokens}" if self.chunk_tokens else ""
        return " + ".join(parts) + chunks + (f" on {kinds[0]}" if len(kinds) == 1 else "")


@dataclass(frozen=True, slots=True)
class Estimate:
    """Goodput of a unit.

    Parameters
    ----------
    rate
        Highest rate in requests/s that meets the SLO; 0 when no rate does.
    low, high
        90 % interval of ``rate`` over seeds; equal to it for closed forms.
    status
        ``found``, ``at_least_cap``, ``infeasible``, ``unstable``, ``no_data`` or ``error``.
    evidence
        Whatever the evaluator knows beyond the rate, for explanations.
    """

    rate: float
    low: float
    high: float
    status: str = "found"
    evidence: Any = field(default=None, compare=False)

    @classmethod
    def exactly(cls, rate: float) -> Estimate:
        return cls(rate, rate, rate, "found" if rate > 0 else "infeasible")


class Evaluator(Protocol):
    """Goodputs of one model under one workload and SLO.

    ``bound`` is a rate that ``evaluate`` will not exceed (infinite when nothing is known); it
    must be cheap, since it decides what is worth evaluating.
    """

    def fits(self, gpu: str, parallelism: Parallelism) -> bool: ...

    def bound(self, unit: Unit) -> float: ...

    def evaluate(self, units: Sequence[Unit]) -> list[Estimate]: ...


@dataclass(frozen=True, slots=True)
class Scored:
    """A unit with its goodput."""

    unit: Unit
    estimate: Estimate

    @property
    def rate(self) -> float:
        return self.estimate.rate

    @property
    def rate_per_gpu(self) -> float:
        return self.estimate.rate / self.unit.num_gpus

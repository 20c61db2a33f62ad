"""SLOs by class of requests: interactive chat beside summaries, each with limits of its own.

A rate holds when every class meets its own target. One SLO for all requests is the case of one
class, without a name; nothing downstream tells the two apart.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import xarray as xr

from daskserve.core.slo import SLO
from daskserve.errors import InvalidParameter, WorkloadError
from daskserve.planner.workload import Workload

EVERYTHING = ""
"""Name of the only class when one SLO is for all requests."""

LEAST_SHARE = 0.001
"""A rarer class is hardly seen even in the longest simulated run."""


@dataclass(frozen=True, slots=True)
class SLOClasses:
    """Classes in the order in which `index_of` numbers them, each with its SLO."""

    names: tuple[str, ...]
    slos: tuple[SLO, ...]

    @classmethod
    def of(cls, slo: AnySLO) -> SLOClasses:
        """Classes of a mapping from name to SLO; one SLO becomes the class of all requests.

        Raises
        ------
        InvalidParameter
            No class, or one without a name.
        """
        if isinstance(slo, SLOClasses):
            return slo
        if isinstance(slo, SLO):
            return cls((EVERYTHING,), (slo,))
        if not slo or not all(isinstance(name, str) and name.strip() for name in slo):
            raise InvalidParameter("slo", list(slo), "must hold at least one class, all with names")
        return cls(tuple(slo), tuple(slo.values()))

    def given(self) -> SLO | dict[str, SLO]:
        """What people gave: one SLO, or a mapping by name."""
        return dict(self) if self.has_names else self.slos[0]

    def __iter__(self) -> Iterator[tuple[str, SLO]]:
        return iter(zip(self.names, self.slos, strict=True))

    @property
    def has_names(self) -> bool:
        return self.names != (EVERYTHING,)

    @property
    def ttft_s(self) -> np.ndarray:
        return np.array([slo.ttft_s for slo in self.slos])

    @property
    def tpot_s(self) -> np.ndarray:
        return np.array([slo.tpot_s for slo in self.slos])

    @property
    def attainment(self) -> np.ndarray:
        return np.array([slo.attainment for slo in self.slos])

    def with_limits(self, ttft_s: Sequence[float], tpot_s: Sequence[float]) -> SLOClasses:
        """The same classes and targets under other limits, one of each per class."""
        changed = zip(self.slos, ttft_s, tpot_s, strict=True)
        return replace(self, slos=tuple(SLO(a, b, slo.attainment) for slo, a, b in changed))

    def scaled(self, ttft: float = 1.0, tpot: float = 1.0) -> SLOClasses:
        """All limits multiplied; below 1 is stricter."""
        return self.with_limits((self.ttft_s * ttft).tolist(), (self.tpot_s * tpot).tolist())

    def index_of(self, workload: Workload) -> np.ndarray:
        """The class of every request by its place in ``names``.

        Raises
        ------
        WorkloadError
            The workload names no classes, a request's class has no SLO, or a class has no
            requests.
        """
        if not self.has_names:
            return np.zeros(len(workload), np.int64)
        known = ", ".join(self.names)
        if "slo_class" not in workload.dataset:
            raise WorkloadError(f"no data: the workload has no column slo_class for {known}")
        given = workload.dataset["slo_class"].values
        index = np.full(len(given), -1)
        for place, name in enumerate(self.names):
            index[given == name] = place
        if (index < 0).any():
            row = int(np.argmax(index < 0))
            raise WorkloadError(
                f"slo_class={str(given[row])!r} of request {row} has no SLO: there are {known}"
            )
        return index

    def check(self, workload: Workload) -> None:
        """Raises WorkloadError as `index_of` does, or for a class with too few requests to judge.

        An empty workload passes: it is no data for every class alike.
        """
        counts = np.bincount(self.index_of(workload), minlength=len(self.names))
        for name, count in zip(self.names, counts.tolist(), strict=True):
            if count == 0 < len(workload):
                raise WorkloadError(f"no data: SLO class {name!r} has no requests in the workload")
            if count < LEAST_SHARE * len(workload):
                raise WorkloadError(
                    f"SLO class {name!r} has {count} of {len(workload)} requests: at least"
                    f" {LEAST_SHARE:.1%} are needed to judge it"
                )

    def limits(self, asked: SLOClasses) -> str:
        """Those limits that differ from the asked ones, in words."""
        changed = [
            f"TTFT {mine.ttft_s:.3g} s and TPOT {mine.tpot_s:.3g} s{of_class(name)}"
            for (name, mine), theirs in zip(self, asked.slos, strict=True)
            if mine != theirs
        ]
        return ", ".join(changed)

    def __str__(self) -> str:
        return "; ".join(
            f"TTFT {slo.ttft_s:g} s and TPOT {slo.tpot_s:g} s for {slo.attainment:.0%} of"
            f" {_whose(name)}"
            for name, slo in self
        )


AnySLO = SLO | Mapping[str, SLO] | SLOClasses
"""One SLO for all requests, or one by name of the class."""


@dataclass(frozen=True, slots=True)
class ClassShare:
    """How many requests of a class met its limits.

    Parameters
    ----------
    name
        Empty when one SLO is for all requests.
    num_requests
        Of this class, measured.
    attainment, ttft_attainment, tpot_attainment
        Share that met both limits, and each one; NaN without requests.
    target
        The share that must meet both.
    """

    name: str
    num_requests: int
    attainment: float
    ttft_attainment: float
    tpot_attainment: float
    target: float

    @property
    def room(self) -> float:
        """How far attainment is above its target, as part of what may miss; negative below."""
        if math.isnan(self.attainment):
            return math.inf
        return (self.attainment - self.target) / max(1.0 - self.target, 0.01)

    @property
    def is_met(self) -> bool:
        return self.attainment >= self.target

    @property
    def limited_by(self) -> str:
        """``ttft`` or ``tpot``: the limit that more requests miss."""
        return "ttft" if self.ttft_attainment <= self.tpot_attainment else "tpot"

    def __str__(self) -> str:
        return f"{self.attainment:.2%} of {_whose(self.name)} (target {self.target:.0%})"


def shares_of(
    slo: SLOClasses, slo_class: np.ndarray, ttft: np.ndarray, tpot: np.ndarray
) -> tuple[ClassShare, ...]:
    """Attainment of every class; NaN stands for no TPOT, and for no TTFT at all."""
    in_ttft, in_tpot = ttft <= slo.ttft_s[slo_class], ~(tpot > slo.tpot_s[slo_class])
    found = []
    for place, (name, limits) in enumerate(slo):
        mine = slo_class == place
        parts = (in_ttft & in_tpot, in_ttft, in_tpot)
        both, first, after = (float(p[mine].mean()) if mine.any() else math.nan for p in parts)
        found.append(
            ClassShare(name, int(mine.sum()), both, first, after, target=limits.attainment)
        )
    return tuple(found)


def table_of(runs: Sequence[Sequence[ClassShare]]) -> xr.Dataset:
    """By dimensions ``run`` and ``slo_class``: requests, attainment (both, TTFT, TPOT), target."""
    names = ("num_requests", "attainment", "ttft_attainment", "tpot_attainment")
    rows = {name: [[getattr(one, name) for one in run] for run in runs] for name in names}
    data: dict = {name: (("run", "slo_class"), np.array(values)) for name, values in rows.items()}
    data["target"] = ("slo_class", np.array([one.target for one in runs[0]]))
    return xr.Dataset(data, {"slo_class": [one.name for one in runs[0]]})


def binding(shares: Iterable[ClassShare]) -> ClassShare:
    """The class that is closest to missing its target, or furthest below it."""
    return min(shares, key=lambda share: share.room)


def of_class(name: str) -> str:
    """`` of chat``; nothing when one SLO is for all."""
    return f" of {name}" if name else ""


def _whose(name: str) -> str:
    return name or "the requests"

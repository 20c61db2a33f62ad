"""A long trace in little memory: attainment over time and percentiles, without timelines."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import xarray as xr

from daskserve.errors import InvalidParameter, WorkloadError
from daskserve.planner.simulator.compiled import records as r
from daskserve.planner.simulator.deployment import Deployment
from daskserve.planner.simulator.driving import Chunk, Simulation, chunks_of
from daskserve.planner.simulator.result import is_met, tpot_s, ttft_s
from daskserve.planner.slo_classes import AnySLO, SLOClasses
from daskserve.planner.workload import Workload

_LEAST_S = 1e-6
_GROWTH = 1.01
_NUM_BINS = 2400  # up to _LEAST_S * 1.01**2400, about 2e4 s


@dataclass(eq=False)
class Histogram:
    """Counts of durations in bins 1 % wide: quantiles are exact to half of that."""

    counts: np.ndarray = field(default_factory=lambda: np.zeros(_NUM_BINS, np.int64))

    def add(self, seconds: np.ndarray) -> None:
        known = seconds[~np.isnan(seconds)]
        places = np.log(np.maximum(known, _LEAST_S) / _LEAST_S) / np.log(_GROWTH)
        bins = np.minimum(places.astype(np.int64), _NUM_BINS - 1)
        self.counts += np.bincount(bins, minlength=_NUM_BINS)

    def quantile(self, share: float) -> float | None:
        """Seconds below which ``share`` of the durations lie; None without any."""
        total = int(self.counts.sum())
        if total == 0:
            return None
        place = int(np.searchsorted(np.cumsum(self.counts), share * total))
        return float(_LEAST_S * _GROWTH ** (min(place, _NUM_BINS - 1) + 0.5))


@dataclass(eq=False)
class Summary:
    """What is kept of a trace that is simulated in a stream.

    Parameters
    ----------
    slo
        What counts as met.
    window_s
        Width of the windows, by arrival, over which attainment is reported.
    slo_class
        The class of every request of the trace, by its place in ``slo``; None: the first.
    """

    slo: SLOClasses
    window_s: float
    slo_class: np.ndarray | None = None
    ttft: Histogram = field(default_factory=Histogram)
    tpot: Histogram = field(default_factory=Histogram)
    num_rejected: int = 0
    _arrived: np.ndarray = field(init=False)
    _met: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        # A row per window, a column per class.
        self._arrived = self._met = np.zeros((0, len(self.slo.names)), np.int64)

    @property
    def num_requests(self) -> int:
        return int(self._arrived.sum())

    @property
    def attainment(self) -> float | None:
        """Share of requests that met both limits; None (no data) when there were none."""
        return float(self._met.sum() / self.num_requests) if self.num_requests else None

    def windows(self) -> xr.Dataset:
        """Requests and attainment by dimension ``window`` (its start in seconds).

        ``class_attainment`` is the same also by dimension ``slo_class``.
        """
        arrived = self._arrived.sum(axis=1)
        with np.errstate(invalid="ignore"):
            attained, by_class = self._met.sum(axis=1) / arrived, self._met / self._arrived
        data = {
            "num_requests": ("window", arrived),
            "attainment": ("window", attained),
            "class_attainment": (("window", "slo_class"), by_class),
        }
        start_s = np.arange(len(arrived)) * self.window_s
        return xr.Dataset(data, {"window": start_s, "slo_class": list(self.slo.names)})

    def by_class(self) -> xr.Dataset:
        """Requests, attainment and target by dimension ``slo_class``; NaN without requests."""
        arrived = self._arrived.sum(axis=0)
        with np.errstate(invalid="ignore"):
            attained = self._met.sum(axis=0) / arrived
        columns = {"num_requests": arrived, "attainment": attained, "target": self.slo.attainment}
        data = {name: ("slo_class", values) for name, values in columns.items()}
        return xr.Dataset(data, {"slo_class": list(self.slo.names)})

    def add(self, done: np.ndarray) -> None:
        """Fold rows of the event loop in."""
        ttft, tpot = ttft_s(done), tpot_s(done)
        index = np.zeros(len(done), np.int64)
        if self.slo_class is not None:
            index = self.slo_class[done["request_id"]]
        met = is_met(self.slo, ttft, tpot, index)
        self.ttft.add(ttft)
        self.tpot.add(tpot)
        self.num_rejected += int(np.count_nonzero(done["status"] == r.REJECTED))
        window = (done["arrival_s"] / self.window_s).astype(np.int64)
        self._arrived = _added(self._arrived, self._counts(window, index))
        self._met = _added(self._met, self._counts(window[met], index[met]))

    def _counts(self, window: np.ndarray, index: np.ndarray) -> np.ndarray:
        num_classes = len(self.slo.names)
        size = (int(window.max(initial=-1)) + 1) * num_classes
        return np.bincount(window * num_classes + index, minlength=size).reshape(-1, num_classes)


def simulate_stream(
    workload: Workload | Iterable[Chunk],
    deployment: Deployment,
    slo: AnySLO,
    window_s: float = 600.0,
) -> Summary:
    """Simulate a trace of any length in memory that does not grow with it.

    Parameters
    ----------
    workload
        A trace, or pieces of one as ``(arrival_s, prompt_tokens, output_tokens)``, which have
        no classes: one SLO is for all of them.
    window_s
        Width of the windows over which attainment is reported.
    """
    if not window_s > 0:
        raise InvalidParameter("window_s", window_s, "must be a number of seconds above 0")
    classes = SLOClasses.of(slo)
    if isinstance(workload, Workload):
        summary = Summary(classes, window_s, classes.index_of(workload))
        chunks: Iterable[Chunk] = chunks_of(*workload.arrays())
    elif classes.has_names:
        raise WorkloadError("pieces of a trace have no slo_class: give a Workload, or one SLO")
    else:
        summary, chunks = Summary(classes, window_s), workload
    for rows in Simulation(deployment, chunks).ended():
        summary.add(rows)
    return summary


def _added(totals: np.ndarray, counts: np.ndarray) -> np.ndarray:
    longer, shorter = (totals, counts) if len(totals) >= len(counts) else (counts, totals)
    longer = longer.copy()
    longer[: len(shorter)] += shorter
    return longer

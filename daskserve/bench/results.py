"""The requests of a bench as a dataset: one row each, written as NetCDF and read again."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr

from daskserve.bench.record import OK, STAGES, Record
from daskserve.core.slo import SLO
from daskserve.errors import ConfigError
from daskserve.planner.simulator.result import is_met

FORMAT = "daskserve bench 1"


@dataclass(frozen=True, eq=False)
class Results:
    """Requests in order of arrival.

    Parameters
    ----------
    dataset
        Dimension ``request``: ``arrival_s``, ``sent_s``, ``end_s`` (seconds of the bench),
        ``ttft_s``, ``tpot_s``, ``e2el_s`` (NaN where there is none), ``prompt_tokens`` and
        ``output_tokens`` (counted by the server, or as asked for where it did not answer),
        ``max_tokens``, ``status`` (``ok`` or a kind of failure), the five stages (NaN where the
        server tells none), ``run`` (which rate of a search) and ``num_gaps``; and dimension
        ``gap`` with ``gap_s``, the times between tokens, request by request.
    """

    dataset: xr.Dataset

    @classmethod
    def of(cls, runs: Sequence[Sequence[Record]], started_unix_s: float = 0.0) -> Results:
        """The records of one or more runs in order, whose seconds began at that wall clock time."""
        records = [record for run in runs for record in run]
        numbers = [number for number, run in enumerate(runs) for _ in run]
        data: dict[str, Any] = {
            name: ("request", np.array([getattr(r, name) for r in records], dtype))
            for name, dtype in _COLUMNS.items()
        }
        data["ttft_s"] = ("request", np.array([r.ttft_s for r in records], float))
        data["tpot_s"] = ("request", np.array([_nan(r.tpot_s) for r in records], float))
        data["e2el_s"] = ("request", np.array([r.last_s - r.sent_s for r in records], float))
        data["status"] = ("request", np.array([r.status for r in records], dtype=np.str_))
        data["run"] = ("request", np.array(numbers, np.int32))
        unknown = (math.nan,) * len(STAGES)
        stages = np.array([r.stages_s or unknown for r in records], float)
        for column, stage in enumerate(STAGES):
            data[stage] = ("request", stages.reshape(-1, len(STAGES))[:, column])
        data["num_gaps"] = ("request", np.array([len(r.gaps_s) for r in records], np.int32))
        gaps = [np.asarray(r.gaps_s, np.float32) for r in records]
        data["gap_s"] = ("gap", np.concatenate(gaps) if gaps else np.empty(0, np.float32))
        return cls(xr.Dataset(data, attrs={"format": FORMAT, "started_unix_s": started_unix_s}))

    def __len__(self) -> int:
        return self.dataset.sizes["request"]

    def values(self, name: str) -> np.ndarray:
        return np.asarray(self.dataset[name].values)

    @property
    def is_ok(self) -> np.ndarray:
        """Which requests were answered to their end."""
        return np.asarray(self.values("status") == OK)

    def is_met(self, slo: SLO) -> np.ndarray:
        """Which requests met both limits; one that failed met none."""
        met = is_met(slo, self.values("ttft_s"), self.values("tpot_s"))
        return np.asarray(self.is_ok & met)

    def answered_quantile(self, name: str, share: float) -> float | None:
        """Of answered requests; None when no one of them has the figure."""
        values = self.values(name)[self.is_ok]
        known = values[~np.isnan(values)]
        return float(np.quantile(known, share)) if len(known) else None

    @property
    def duration_s(self) -> float:
        """From the first request sent to the end of the last; 0 without any."""
        if not len(self):
            return 0.0
        return float(self.values("end_s").max() - self.values("sent_s").min())

    def stages(self) -> xr.Dataset | None:
        """Of answered requests, by stage; None when the server told none."""
        known = self.is_ok & ~np.isnan(self.values(STAGES[0]))
        return self.dataset[list(STAGES)].isel(request=known) if known.any() else None

    def write(self, path: str | Path) -> None:
        """As NetCDF; ConfigError when it cannot be written."""
        try:
            self.dataset.to_netcdf(path, engine="scipy")
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror or error}") from None

    @classmethod
    def joined(cls, parts: Sequence[Results]) -> Results:
        """Several clients' requests as those of one, in order of arrival.

        Their clocks are set by the wall clock times at which they started, so clients on several
        machines are as far apart as those are.
        """
        starts = [part.dataset.attrs["started_unix_s"] for part in parts]
        shifted = []
        for part, start_s in zip(parts, starts, strict=True):
            times = ("arrival_s", "sent_s", "end_s")
            offset_s = start_s - min(starts)
            shifted.append(part.dataset.assign({n: part.dataset[n] + offset_s for n in times}))
        # Rows and their gaps each belong together: sort the pieces that they make up.
        rows = xr.concat([one.drop_dims("gap") for one in shifted], "request")
        order = np.argsort(rows["arrival_s"].values, kind="stable")
        ends = np.cumsum(rows["num_gaps"].values)
        gaps = np.split(np.concatenate([one["gap_s"].values for one in shifted]), ends[:-1])
        sorted_gaps = np.concatenate([gaps[row] for row in order]) if len(order) else gaps[0]
        dataset = rows.isel(request=order).assign(gap_s=("gap", sorted_gaps))
        return cls(dataset.assign_attrs(format=FORMAT, started_unix_s=min(starts)))

    @classmethod
    def read(cls, path: str | Path) -> Results:
        """What `write` wrote (ConfigError)."""
        try:
            dataset = xr.load_dataset(path, engine="scipy")
        except (OSError, TypeError, ValueError) as error:
            raise ConfigError(f"cannot read {path}: {error}") from None
        if dataset.attrs.get("format") != FORMAT:
            raise ConfigError(f"{path} was not written by daskserve bench --output")
        return cls(dataset)


_COLUMNS = {
    "arrival_s": np.float64,
    "sent_s": np.float64,
    "end_s": np.float64,
    "prompt_tokens": np.int32,
    "max_tokens": np.int32,
    "output_tokens": np.int32,
}


def _nan(value: float | None) -> float:
    return math.nan if value is None else value

"""What a simulation answers: the timeline of every request and how busy everything was."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import xarray as xr

from daskserve.planner.simulator.compiled import records as r
from daskserve.planner.slo_classes import AnySLO, ClassShare, SLOClasses, shares_of, table_of
from daskserve.planner.workload import Workload

STAGES = ("prefill_queue_s", "prefill_s", "kv_transfer_s", "decode_queue_s", "decode_s")
"""DistServe's five stages (section 6.3), in the order in which they happen."""


def ttft_s(done: np.ndarray) -> np.ndarray:
    """Time to first token; NaN for a request that no pool could hold."""
    ttft: np.ndarray = done["prefill_queue_s"] + done["prefill_s"]
    return ttft


def tpot_s(done: np.ndarray) -> np.ndarray:
    """Time per output token after the first; NaN for a single token, or if nobody decodes."""
    after_first_s = done["kv_transfer_s"] + done["decode_queue_s"] + done["decode_s"]
    has_tpot = (done["output_tokens"] > 1) & (done["decode_instance"] >= 0)
    tpot: np.ndarray = after_first_s / np.where(has_tpot, done["output_tokens"] - 1, np.nan)
    return tpot


def is_met(
    slo: AnySLO, ttft: np.ndarray, tpot: np.ndarray, slo_class: np.ndarray | int = 0
) -> np.ndarray:
    """`SLO.is_met` for arrays; NaN stands for no TPOT, and for no TTFT at all.

    ``slo_class`` are places among the classes, as of `SLOClasses.index_of`.
    """
    slo = SLOClasses.of(slo)
    met: np.ndarray = (ttft <= slo.ttft_s[slo_class]) & ~(tpot > slo.tpot_s[slo_class])
    return met


@dataclass(frozen=True, eq=False)
class SimulationResult:
    """Parameters
    ----------
    timelines
        Dimension ``request``: arrival, the five stages, ``ttft_s``, ``tpot_s``, ``slo_class``
        where the workload has it, who served it
        (-1: nobody), how often its prompt was computed again, and whether it was ``rejected``
        because no pool could ever hold it.
    instances
        Dimension ``instance``: role, share of the time that its stages computed, most KV pages
        in use, pages in all.
    end_s
        When the last token was out.
    """

    timelines: xr.Dataset
    instances: xr.Dataset
    end_s: float

    @property
    def num_rejected(self) -> int:
        return int(self.timelines["rejected"].sum())

    def attainment(self, slo: AnySLO) -> float | None:
        """Share of requests that met both limits; None (no data) when there were none."""
        shares = self.shares(slo)
        total = sum(share.num_requests for share in shares)
        met = sum(share.attainment * share.num_requests for share in shares if share.num_requests)
        return met / total if total else None

    def shares(self, slo: AnySLO) -> tuple[ClassShare, ...]:
        """Attainment of every class. Raises WorkloadError for a class without SLO."""
        slo = SLOClasses.of(slo)
        index = slo.index_of(Workload(self.timelines))
        timelines = self.timelines
        return shares_of(slo, index, timelines["ttft_s"].values, timelines["tpot_s"].values)

    def by_class(self, slo: AnySLO) -> xr.Dataset:
        """By dimension ``slo_class``: requests, attainment (both limits, TTFT, TPOT), target."""
        return table_of([self.shares(slo)]).isel(run=0)

    def percentiles(self, shares: tuple[float, ...] = (0.5, 0.9, 0.99)) -> xr.Dataset:
        """Of every stage, TTFT and TPOT in seconds, by dimension ``share``; NaN without data."""
        names = (*STAGES, "ttft_s", "tpot_s")
        values = {
            name: ("share", _quantiles(self.timelines[name].values, shares)) for name in names
        }
        return xr.Dataset(values, {"share": list(shares)})

    def _repr_html_(self) -> str:
        return self.percentiles()._repr_html_() + self.timelines._repr_html_()


def timelines_of(done: np.ndarray, workload: Workload) -> xr.Dataset:
    """The rows of the event loop as a dataset, with the classes of the workload."""
    data = {name: ("request", done[name].copy()) for name in ("arrival_s", *STAGES)}
    data["ttft_s"] = ("request", ttft_s(done))
    data["tpot_s"] = ("request", tpot_s(done))
    for name in ("output_tokens", "num_recomputes", "prefill_instance", "decode_instance"):
        data[name] = ("request", done[name].astype(np.int32))
    data["rejected"] = ("request", done["status"] == r.REJECTED)
    if "slo_class" in workload.dataset:
        data["slo_class"] = ("request", workload.dataset["slo_class"].values)
    return xr.Dataset(data)


def instances_of(tables: r.Tables) -> xr.Dataset:
    """How busy every instance was."""
    end_s = tables.world[0].now_s
    tables_of_role = (tables.prefills, tables.instances)
    busy, peak, total, stages = [], [], [], []
    for table in tables_of_role:
        num_stages = tables.times.num_stages[table.times]
        stages.append(num_stages)
        busy.append(np.divide(table.busy_s, num_stages * end_s) if end_s > 0 else table.busy_s)
        peak.append(table.peak_blocks)
        total.append(table.total_blocks)
    decode_role = "decode" if tables.world[0].mode == r.PULLED else "colocated"
    role = ["prefill"] * len(tables.prefills) + [decode_role] * len(tables.instances)
    return xr.Dataset(
        {
            "role": ("instance", np.array(role, dtype="U9")),
            "busy_share": ("instance", np.concatenate(busy)),
            "peak_kv_blocks": ("instance", np.concatenate(peak)),
            "total_kv_blocks": ("instance", np.concatenate(total)),
        }
    )


def _quantiles(values: np.ndarray, shares: tuple[float, ...]) -> np.ndarray:
    known = values[~np.isnan(values)]
    return np.quantile(known, shares) if len(known) else np.full(len(shares), np.nan)

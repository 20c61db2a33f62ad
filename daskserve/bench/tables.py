"""Attainment by scale of the SLO, and where the time of a request goes (DistServe's Figure 10)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from daskserve.bench.record import STAGES
from daskserve.bench.results import Results
from daskserve.bench.summary import WIDTH
from daskserve.core.slo import SLO

SCALES = (0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 3.0)
CDF_SHARES = (0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1.0)


def scaled(slo: SLO, scale: float) -> SLO:
    """Both limits times ``scale``; below 1 is stricter."""
    return SLO(slo.ttft_s * scale, slo.tpot_s * scale, slo.attainment)


def scale_lines(results: Results, slo: SLO, scales: Sequence[float]) -> list[str]:
    """Shares of all requests that meet the SLO times each scale: both limits, and each alone."""
    ok, ttft, tpot = results.is_ok, results.values("ttft_s"), results.values("tpot_s")
    lines = [
        "SLO by Scale".center(WIDTH, "-"),
        f"{'scale':>5}{'TTFT s':>9}{'TPOT s':>9}{'both':>9}{'TTFT':>9}{'TPOT':>9}",
    ]
    for scale in scales:
        limits = scaled(slo, scale)
        met = (
            results.is_met(limits),
            ok & (ttft <= limits.ttft_s),
            ok & ~(tpot > limits.tpot_s),
        )
        shares = "".join(f"{share.mean():9.1%}" for share in met)
        lines.append(f"{scale:5g}{limits.ttft_s:9.4g}{limits.tpot_s:9.4g}{shares}")
    return lines


def stage_lines(results: Results) -> list[str]:
    """Time in each stage and its share of all, and the CDF of the KV transfers; none if unknown."""
    stages = results.stages()
    if stages is None:
        return []
    values = {stage: stages[stage].values * 1e3 for stage in STAGES}
    total = sum(stage.sum() for stage in values.values()) or 1.0
    lines = [
        "Stages of a Request (ms)".center(WIDTH, "-"),
        f"{'':14}{'mean':>9}{'p50':>9}{'p90':>9}{'p99':>9}{'share':>8}",
    ]
    for stage, of_stage in values.items():
        figures = (of_stage.mean(), *np.quantile(of_stage, (0.5, 0.9, 0.99)))
        name = stage.removesuffix("_s").replace("_", " ").replace("kv", "KV")
        shown = "".join(f"{figure:9.2f}" for figure in figures)
        lines.append(f"{name:14}{shown}{of_stage.sum() / total:8.1%}")
    transfers = np.quantile(values["kv_transfer_s"], CDF_SHARES)
    lines.append("CDF of KV Transfer Time".center(WIDTH, "-"))
    lines.append("share of requests  " + "".join(f"{share:8.0%}" for share in CDF_SHARES))
    lines.append("within (ms)        " + "".join(f"{value:8.2f}" for value in transfers))
    return lines

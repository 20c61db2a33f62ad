"""Per-request latencies of one simulation, with the original's two ways to judge them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import xarray as xr

from daskserve.core.slo import SLO
from daskserve.errors import WorkloadError


@dataclass(frozen=True, slots=True, eq=False)
class RequestLatencies:
    """Seconds of every request, in order of arrival.

    ``tpot_s`` is ``decode_s / output_tokens``: the original runs one decode step per output
    token after the prefill that already made the first one.
    """

    ttft_s: np.ndarray
    decode_s: np.ndarray
    tpot_s: np.ndarray

    @property
    def total_s(self) -> np.ndarray:
        return np.asarray(self.ttft_s + self.decode_s)

    def attained(self, slo: SLO) -> float | None:
        """Share of requests that meet both limits; None when there are no requests."""
        if len(self.ttft_s) == 0:
            return None
        return float(np.mean((self.ttft_s <= slo.ttft_s) & (self.tpot_s <= slo.tpot_s)))

    def passes(self, slo: SLO) -> bool:
        """The original's criterion: the percentile of each metric alone is below its limit.

        Easier than joint attainment, since different requests may miss the two limits.
        """
        if len(self.ttft_s) == 0:
            raise WorkloadError("no data: an empty trace neither meets nor misses an SLO")
        ttft_s = np.quantile(self.ttft_s, slo.attainment)
        tpot_s = np.quantile(self.tpot_s, slo.attainment)
        return bool(ttft_s < slo.ttft_s and tpot_s < slo.tpot_s)

    def dataset(self) -> xr.Dataset:
        """The same as an xarray Dataset with the dimension ``request``."""
        names = ("ttft_s", "decode_s", "tpot_s", "total_s")
        return xr.Dataset({name: ("request", getattr(self, name)) for name in names})

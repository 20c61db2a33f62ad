"""The traffic to plan for: when requests arrive and how long their prompts and answers are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import xarray as xr
from numpy.typing import ArrayLike

from daskserve.errors import WorkloadError
from daskserve.planner.arrivals import ArrivalProcess, Poisson, fit_arrivals


@dataclass(frozen=True, eq=False)
class Workload:
    """Requests in order of arrival.

    Parameters
    ----------
    dataset
        Dimension ``request`` with ``arrival_s`` (float64, sorted, not negative),
        ``prompt_tokens`` and ``output_tokens`` (int64, at least 1). Optional: ``slo_class``
        (text, the name of the class whose limits the request has); dimension
        ``prefix_block`` with ``prefix_block_id`` (equal ids mean an equal prefix up to there)
        and ``num_prefix_blocks`` per request, attribute ``prefix_block_tokens``.
    """

    dataset: xr.Dataset

    @classmethod
    def from_arrays(
        cls,
        arrival_s: ArrayLike,
        prompt_tokens: ArrayLike,
        output_tokens: ArrayLike,
        slo_class: ArrayLike | None = None,
        **attributes: Any,
    ) -> Workload:
        """Checks the arrays and wraps them; ``attributes`` such as ``name`` are kept.

        Raises
        ------
        WorkloadError
            Lengths differ, times unsorted, negative or not finite, token counts below 1, a
            class without a name.
        """
        arrival = np.array(arrival_s, dtype=np.float64, copy=True)
        prompt = _token_counts("prompt_tokens", prompt_tokens)
        output = _token_counts("output_tokens", output_tokens)
        if not len(arrival) == len(prompt) == len(output):
            sizes = f"{len(arrival)} arrivals, {len(prompt)} prompts, {len(output)} outputs"
            raise WorkloadError(f"a workload needs one of each per request, got {sizes}")
        _check_arrivals(arrival)
        data = {
            "arrival_s": ("request", arrival),
            "prompt_tokens": ("request", prompt),
            "output_tokens": ("request", output),
        }
        if slo_class is not None:
            data["slo_class"] = ("request", _class_names(slo_class, len(arrival)))
        return cls(xr.Dataset(data, attrs=attributes))

    @classmethod
    def uniform(
        cls, num_requests: int, rate: float, prompt_tokens: int, output_tokens: int, seed: int = 0
    ) -> Workload:
        """Poisson arrivals of requests that all have the same lengths."""
        one = cls.from_arrays([0.0], [prompt_tokens], [output_tokens])
        return one.resample(num_requests, rate, seed, arrivals=Poisson())

    def __len__(self) -> int:
        return self.dataset.sizes["request"]

    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """``(arrival_s, prompt_tokens, output_tokens)``."""
        data = self.dataset
        return (
            data["arrival_s"].values,
            data["prompt_tokens"].values,
            data["output_tokens"].values,
        )

    @property
    def rate(self) -> float | None:
        """Requests per second over the span; None when fewer than two times are known."""
        arrival = self.dataset["arrival_s"].values
        span_s = float(arrival[-1] - arrival[0]) if len(arrival) else 0.0
        return (len(arrival) - 1) / span_s if span_s > 0 else None

    def scaled_to(self, rate: float) -> Workload:
        """The same requests in the same pattern, faster or slower, first arrival at 0."""
        _check_rate(rate)
        if self.rate is None:
            raise WorkloadError(
                f"a workload of {len(self)} request(s) without a time span has no rate to scale;"
                " resample it instead"
            )
        arrival = self.dataset["arrival_s"]
        scaled = (arrival - arrival[0]) * (self.rate / rate)
        return Workload(self.dataset.assign(arrival_s=scaled))

    def within(self, most_tokens: int) -> Workload:
        """Without the requests whose prompt and output together are longer."""
        _, prompt, output = self.arrays()
        prefixes = ["prefix_block_id", "num_prefix_blocks"]
        kept = self.dataset.drop_vars(prefixes, errors="ignore")
        return Workload(kept.isel(request=prompt + output <= most_tokens))

    def resample(
        self, num_requests: int, rate: float, seed: int, arrivals: ArrivalProcess | None = None
    ) -> Workload:
        """Draw a new trace: lengths jointly from these requests, arrivals from a fitted process.

        Parameters
        ----------
        rate
            Requests per second of the new trace.
        seed
            The same seed gives the same trace.
        arrivals
            None fits one to this trace (Poisson if it is too short to tell).
        """
        _check_rate(rate)
        if num_requests < 1:
            raise WorkloadError(f"num_requests={num_requests} must be at least 1")
        if len(self) == 0:
            raise WorkloadError("no data: an empty workload cannot be resampled")
        process = arrivals or fit_arrivals(self.dataset["arrival_s"].values)
        generator = np.random.default_rng(seed)
        rows = generator.integers(0, len(self), num_requests)
        arrival_s = process.sample(num_requests, rate, generator)
        if num_requests > 1 and arrival_s[-1] > 0:
            # Exactly the asked rate: a short draw of bursts can be off by a good deal.
            arrival_s *= (num_requests - 1) / rate / arrival_s[-1]
        _, prompt, output = self.arrays()
        data = self.dataset
        classes = data["slo_class"].values[rows] if "slo_class" in data else None
        return Workload.from_arrays(arrival_s, prompt[rows], output[rows], classes, **data.attrs)

    def _repr_html_(self) -> str:
        return self.dataset._repr_html_()


def _check_rate(rate: float) -> None:
    if not (np.isfinite(rate) and rate > 0):
        raise WorkloadError(f"rate={rate!r} must be a finite number of requests/s above 0")


def _token_counts(name: str, values: ArrayLike) -> np.ndarray:
    raw = np.asarray(values, dtype=np.float64)
    if raw.ndim != 1 or not np.isfinite(raw).all() or (raw != np.floor(raw)).any():
        raise WorkloadError(f"{name} must be one row of whole numbers")
    if (raw < 1).any():
        row = int(np.argmax(raw < 1))
        raise WorkloadError(f"{name}={raw[row]:g} in request {row} must be at least 1")
    return raw.astype(np.int64)


def _class_names(values: ArrayLike, num_requests: int) -> np.ndarray:
    names = np.asarray(values)
    if names.shape != (num_requests,) or (num_requests and names.dtype.kind != "U"):
        raise WorkloadError(f"slo_class must be one name for each of {num_requests} requests")
    if (names == "").any():
        raise WorkloadError(f"slo_class of request {int(np.argmax(names == ''))} must have a name")
    return names


def _check_arrivals(arrival: np.ndarray) -> None:
    if arrival.ndim != 1 or not np.isfinite(arrival).all() or (arrival < 0).any():
        raise WorkloadError("arrival_s must be one row of finite seconds of at least 0")
    steps = np.diff(arrival)
    if (steps < 0).any():
        row = int(np.argmax(steps < 0)) + 1
        raise WorkloadError(
            f"arrivals are not sorted: request {row} at {arrival[row]:g} s comes after"
            f" {arrival[row - 1]:g} s; sort the trace first"
        )

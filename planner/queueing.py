"""Closed forms of DistServe sections 3 and 4: what a plan can be checked against by hand.

Prefill with equal prompts is a queue with Poisson arrivals and a fixed service time; decode is
bound by memory. The search does not use these formulas, explanations, tests and notebooks do.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from daskserve.errors import InvalidParameter, WorkloadError


def mg1_wait_s(rate: float, mean_service_s: float, mean_square_service_s2: float) -> float:
    """Mean wait before service of one first-come-first-served server with Poisson arrivals.

    Pollaczek and Khinchine: ``rate * E[S^2] / (2 (1 - rate * E[S]))``; infinite when unstable.
    """
    _at_least_0("rate", rate)
    _above_0("mean_service_s", mean_service_s)
    if not mean_square_service_s2 >= mean_service_s**2 * (1 - 1e-12):
        raise InvalidParameter(
            "mean_square_service_s2",
            mean_square_service_s2,
            f"must be at least mean_service_s squared, {mean_service_s**2:g}",
        )
    load = rate * mean_service_s
    return rate * mean_square_service_s2 / (2 * (1 - load)) if load < 1 else math.inf


def md1_wait_s(rate: float, service_s: float) -> float:
    """Mean wait before service when every request takes ``service_s``."""
    _above_0("service_s", service_s)
    return mg1_wait_s(rate, service_s, service_s**2)


def lindley_waits_s(arrival_s: np.ndarray, service_s: np.ndarray) -> np.ndarray:
    """Wait of each request at one first-come-first-served server, path by path.

    Lindley's recursion ``W' = max(0, W + S - gap)``, summed without a loop.

    Parameters
    ----------
    arrival_s
        Sorted times of arrival.
    service_s
        Service time of each request.
    """
    arrival = np.asarray(arrival_s, dtype=np.float64)
    service = np.asarray(service_s, dtype=np.float64)
    if arrival.shape != service.shape or arrival.ndim != 1:
        raise WorkloadError(f"{arrival.size} arrivals need one service time each")
    if (np.diff(arrival) < 0).any():
        raise WorkloadError("arrivals are not sorted; sort the trace first")
    work_before = np.cumsum(service) - service
    starts = work_before + np.maximum.accumulate(arrival - work_before)
    return np.maximum(starts - arrival, 0.0)


@dataclass(frozen=True, slots=True)
class PrefillQueue:
    """A prefill instance that serves equal prompts one by one, possibly as a pipeline.

    Parameters
    ----------
    latency_s
        Ds, one prompt from entering the first stage to leaving the last.
    bottleneck_s
        Dm, its time in the slowest stage.
    """

    latency_s: float
    bottleneck_s: float

    def __post_init__(self) -> None:
        _above_0("latency_s", self.latency_s)
        _above_0("bottleneck_s", self.bottleneck_s)
        if self.bottleneck_s > self.latency_s * (1 + 1e-12):
            limit = f"must be at most latency_s, {self.latency_s:g}"
            raise InvalidParameter("bottleneck_s", self.bottleneck_s, limit)

    @classmethod
    def of(
        cls, device_s: float, speedup: float = 1.0, pp: int = 1, stage_overhead: float = 0.0
    ) -> PrefillQueue:
        """The queue of any TP and PP.

        Parameters
        ----------
        device_s
            D, one prompt on one GPU.
        speedup
            K of the tensor-parallel degree, from 1 to that degree.
        pp
            Pipeline stages of equal length.
        stage_overhead
            Share that each stage after the first adds to the whole pass.
        """
        _above_0("device_s", device_s)
        _at_least_0("stage_overhead", stage_overhead)
        if not (math.isfinite(speedup) and speedup >= 1):
            raise InvalidParameter("speedup", speedup, "must be a finite number of at least 1")
        if isinstance(pp, bool) or not isinstance(pp, int) or pp < 1:
            raise InvalidParameter("pp", pp, "must be a whole number of at least 1")
        latency_s = device_s / speedup * (1 + stage_overhead * (pp - 1))
        return cls(latency_s, latency_s / pp)

    @property
    def stability_limit(self) -> float:
        """Requests/s from which on the queue grows without bound."""
        return 1 / self.bottleneck_s

    def mean_ttft_s(self, rate: float) -> float:
        """The paper's equations 1 to 3: pass plus wait; infinite from the stability limit on."""
        return self.latency_s + md1_wait_s(rate, self.bottleneck_s)

    def highest_rate(self, ttft_s: float) -> float:
        """Most requests/s with a mean TTFT of ``ttft_s``; 0 when even an empty queue is late."""
        _above_0("ttft_s", ttft_s)
        slack_s = ttft_s - self.latency_s
        if slack_s <= 0:
            return 0.0
        return 2 * slack_s / (self.bottleneck_s * (self.bottleneck_s + 2 * slack_s))


def crossing_rate(first: PrefillQueue, second: PrefillQueue) -> float | None:
    """Requests/s at which two instances have the same mean TTFT; None if one always wins.

    Equal TTFT is a quadratic in the rate, whose smaller root lies below both stability limits.
    """
    a, b = first.bottleneck_s, second.bottleneck_s
    head_start_s = first.latency_s - second.latency_s
    excess_s = 2 * head_start_s - (a - b)
    # The instance with the shorter pass must also be the one that saturates earlier.
    if head_start_s * (a - b) >= 0:
        return None
    root = math.sqrt((a + b) ** 2 * excess_s**2 - 8 * head_start_s * a * b * excess_s)
    return ((a + b) * abs(excess_s) - root) / (2 * a * b * abs(excess_s))


def two_way_crossing_rate(device_s: float, speedup: float) -> float:
    """Requests/s up to which two GPUs do better as TP2 with K = ``speedup`` than as PP2.

    ``x = R D`` solves ``x^2 - (K + 2) x + 8 K (K - 1) / (3 K - 2) = 0``.
    """
    _above_0("device_s", device_s)
    if not 1 <= speedup <= 2:
        raise InvalidParameter("speedup", speedup, "must be 1..2 for two GPUs")
    total = speedup + 2
    constant = 8 * speedup * (speedup - 1) / (3 * speedup - 2)
    return (total - math.sqrt(max(0.0, total**2 - 4 * constant))) / 2 / device_s


@dataclass(frozen=True, slots=True)
class DecodeRoofline:
    """A decode instance bound by reading weights and KV, or by arithmetic at large batches.

    Parameters
    ----------
    weight_bytes, kv_bytes_per_token
        Of the whole model.
    memory_bytes, bytes_per_s
        Capacity of all its GPUs; bandwidth of those that read at the same time (its TP group).
    flops_per_token, flops_per_s
        Two per parameter; of the same GPUs. The defaults leave arithmetic out.
    """

    weight_bytes: float
    kv_bytes_per_token: float
    memory_bytes: float
    bytes_per_s: float
    flops_per_token: float = 0.0
    flops_per_s: float = math.inf

    def __post_init__(self) -> None:
        for name in ("weight_bytes", "kv_bytes_per_token", "memory_bytes", "bytes_per_s"):
            _above_0(name, getattr(self, name))
        _at_least_0("flops_per_token", self.flops_per_token)
        if not self.flops_per_s > 0:
            raise InvalidParameter("flops_per_s", self.flops_per_s, "must be above 0")

    @property
    def kv_budget_bytes(self) -> float:
        """Memory beside the weights, 0 when they do not fit."""
        return max(0.0, self.memory_bytes - self.weight_bytes)

    def most_requests(self, context_tokens: float) -> int:
        """Requests of that context that fit in the KV budget; an upper bound."""
        _above_0("context_tokens", context_tokens)
        return int(self.kv_budget_bytes // (context_tokens * self.kv_bytes_per_token))

    def tpot_s(self, batch_size: int, context_tokens: float) -> float:
        """One step: every request of the batch gets a token."""
        if batch_size < 1:
            raise InvalidParameter("batch_size", batch_size, "must be at least 1")
        _at_least_0("context_tokens", context_tokens)
        read = self.weight_bytes + batch_size * context_tokens * self.kv_bytes_per_token
        arithmetic_s = batch_size * self.flops_per_token / self.flops_per_s
        return max(read / self.bytes_per_s, arithmetic_s)

    def tokens_per_s(self, batch_size: int, context_tokens: float) -> float:
        """Output tokens per second of all requests together, for one micro-batch at a time."""
        return batch_size / self.tpot_s(batch_size, context_tokens)


def prefill_s(
    num_parameters: float, num_tokens: float, flops_per_s: float, utilisation: float = 0.5
) -> float:
    """D: two FLOPs per parameter and token at a share of the peak; attention left out."""
    for name, value in (("num_parameters", num_parameters), ("num_tokens", num_tokens)):
        _above_0(name, value)
    _above_0("flops_per_s", flops_per_s)
    if not 0 < utilisation <= 1:
        raise InvalidParameter("utilisation", utilisation, "must be above 0 and at most 1")
    return 2 * num_parameters * num_tokens / (utilisation * flops_per_s)


def ridge_point(flops_per_s: float, bytes_per_s: float) -> float:
    """FLOP/byte above which a GPU is bound by arithmetic; for fp16 weights, tokens per pass."""
    _above_0("flops_per_s", flops_per_s)
    _above_0("bytes_per_s", bytes_per_s)
    return flops_per_s / bytes_per_s


def kv_transfer_s(num_tokens: float, kv_bytes_per_token: float, bytes_per_s: float) -> float:
    """Seconds to move the KV of one prompt over a link that nothing else uses."""
    _at_least_0("num_tokens", num_tokens)
    _above_0("kv_bytes_per_token", kv_bytes_per_token)
    _above_0("bytes_per_s", bytes_per_s)
    return num_tokens * kv_bytes_per_token / bytes_per_s


def kv_bytes_per_s(rate: float, mean_prompt_tokens: float, kv_bytes_per_token: float) -> float:
    """Link bandwidth that a stream of prompts needs; decides which placements a cluster can use."""
    _at_least_0("rate", rate)
    _at_least_0("mean_prompt_tokens", mean_prompt_tokens)
    _above_0("kv_bytes_per_token", kv_bytes_per_token)
    return rate * mean_prompt_tokens * kv_bytes_per_token


def _above_0(name: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        raise InvalidParameter(name, value, "must be a finite number above 0")


def _at_least_0(name: str, value: float) -> None:
    if not (math.isfinite(value) and value >= 0):
        raise InvalidParameter(name, value, "must be a finite number of at least 0")

"""Rates by formula: cheap, never below what the simulator finds, and so fit to prune with."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from daskserve.core.slo import SLO
from daskserve.planner.step_times import StepTimes
from daskserve.planner.workload import Workload

SAMPLE = 512
"""Requests that stand for a workload's demand."""
PREFILL_MARGIN = 1.35
DECODE_MARGIN = 1.15
"""How far the formulas may be below the simulator; tests hold them to it."""


@dataclass(frozen=True, slots=True, eq=False)
class Demand:
    """Lengths and limits of a sample of requests.

    Parameters
    ----------
    prompt, output
        Tokens of each request.
    ttft_s, tpot_s
        Limits of each request; they differ where a workload has several SLO classes.
    attainment
        Share that must meet them.
    most_tokens
        Prompt and output of the longest request of all, not only of the sample.
    """

    prompt: np.ndarray
    output: np.ndarray
    ttft_s: np.ndarray
    tpot_s: np.ndarray
    attainment: float
    most_tokens: int

    @classmethod
    def of(cls, workload: Workload, slo: SLO) -> Demand:
        _, prompt, output = workload.arrays()
        most_tokens = int((prompt + output).max())
        rows = np.linspace(0, len(prompt) - 1, min(SAMPLE, len(prompt))).astype(np.int64)
        prompt, output = prompt[rows].astype(np.float64), output[rows].astype(np.float64)
        ttft_s, tpot_s = np.full(len(rows), slo.ttft_s), np.full(len(rows), slo.tpot_s)
        return cls(prompt, output, ttft_s, tpot_s, slo.attainment, most_tokens)

    @property
    def steps(self) -> np.ndarray:
        """Decode steps of each request."""
        return np.maximum(self.output - 1.0, 0.0)

    @property
    def mean_context(self) -> float:
        """Tokens of context of a request in decode, averaged over its steps."""
        steps = self.steps
        if steps.sum() == 0:
            return float(self.prompt.mean())
        return float(((self.prompt + self.output / 2.0) * steps).sum() / steps.sum())


def prefill_rate(step: StepTimes, num: int, demand: Demand) -> float:
    """Rate of ``num`` pooled prefill instances at which the share of TTFT met falls to the target.

    Waiting is that of M/G/k with an exponential tail; batching makes a request cost its share of
    the best batch.
    """
    alone = _prefill_latency_s(step, demand.prompt)
    slack = demand.ttft_s - alone
    if (slack >= 0).mean() < demand.attainment:
        return 0.0
    stage = _amortised_stage_s(step, demand.prompt)
    mean, second = float(stage.mean()), float((stage**2).mean())
    if mean == 0:
        return math.inf
    low, high = 0.0, num / mean
    for _ in range(40):
        rate = (low + high) / 2.0
        load = rate * mean / num
        waits = load ** math.sqrt(2.0 * (num + 1)) if num > 1 else load
        typical = second / (2.0 * mean) / (num * max(1.0 - load, 1e-12))
        met = np.where(slack >= 0, 1.0 - waits * np.exp(-np.maximum(slack, 0.0) / typical), 0.0)
        low, high = (rate, high) if met.mean() >= demand.attainment else (low, rate)
    return low


def decode_rate(step: StepTimes, num: int, demand: Demand) -> float:
    """Rate of ``num`` decode instances at the largest batch that memory and TPOT allow."""
    steps = float(demand.steps.mean())
    if steps == 0:
        return math.inf
    batch, interval = largest_batch(step, demand)
    return num * step.num_stages * batch / interval / steps if batch else 0.0


def largest_batch(step: StepTimes, demand: Demand) -> tuple[int, float]:
    """``(requests per micro-batch, seconds per token)`` at the limit of memory or TPOT."""
    sizes = np.arange(1, step.max_batch_size + 1)
    context = demand.mean_context
    passes = step.decode_base_s[sizes] + step.decode_per_context_s[sizes] * sizes * context
    interval = np.maximum(passes + step.num_stages * step.stage_overhead_s, 1e-12)
    tpot_s = float(demand.tpot_s.max())
    in_memory = sizes * step.num_stages * context <= step.kv_capacity_tokens
    allowed = in_memory & (interval <= tpot_s)
    if not allowed.any():
        return 0, math.inf
    best = int(np.argmax(np.where(allowed, sizes / interval, 0.0)))
    return int(sizes[best]), float(interval[best])


def colocated_rate(step: StepTimes, num: int, demand: Demand, chunk_tokens: int = 0) -> float:
    """Rate of instances that do both: neither phase alone may be over its limit.

    Whole prompts take their time from decode; pieces may ride along at best for free.
    """
    prefill = prefill_rate(step, num, demand)
    decode = decode_rate(step, num, demand)
    if chunk_tokens or min(prefill, decode) == 0:
        return min(prefill, decode)
    batch, interval = largest_batch(step, demand)
    steps = float(demand.steps.mean())
    decode_s = steps * interval / (batch * step.num_stages) if steps else 0.0
    together = num / (float(_amortised_stage_s(step, demand.prompt).mean()) + decode_s)
    return min(prefill, decode, together)


def _prefill_latency_s(step: StepTimes, prompt: np.ndarray) -> np.ndarray:
    return np.array([step.latency_s(step.prefill_s(n)) for n in prompt])


def _amortised_stage_s(step: StepTimes, prompt: np.ndarray) -> np.ndarray:
    """Seconds of one stage per request when it shares the fullest allowed batch."""
    stage = np.empty(len(prompt))
    for i, tokens in enumerate(prompt):
        batch_tokens = max(float(tokens), float(step.prefill_budget_tokens))
        share = tokens / batch_tokens
        linear_s = step.prefill_s(batch_tokens, 0.0) * share
        squares_s = step.prefill_quadratic_s * tokens**2
        stage[i] = (linear_s + squares_s) / step.num_stages + step.stage_overhead_s * share
    return stage

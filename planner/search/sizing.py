"""Rates by formula: cheap, never below what the simulator finds, and so fit to prune with."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from daskserve.core.slo import SLO
from daskserve.planner.step_times import StepTimes
from daskserve.planner.workload import Workload

SAMPLE = 512
"""Requests that stand for a workload's lengths."""
PREFILL_MARGIN = 1.35
DECODE_MARGIN = 1.15
"""How far the formulas may be below the simulator; tests hold them to it."""


@dataclass(frozen=True, slots=True, eq=False)
class Lengths:
    """Prompt and output tokens of a sample of requests."""

    prompt: np.ndarray
    output: np.ndarray

    @classmethod
    def of(cls, workload: Workload) -> Lengths:
        _, prompt, output = workload.arrays()
        rows = np.linspace(0, len(prompt) - 1, min(SAMPLE, len(prompt))).astype(np.int64)
        return cls(prompt[rows].astype(np.float64), output[rows].astype(np.float64))

    @property
    def mean_context(self) -> float:
        """Tokens of context of a request in decode, averaged over its steps."""
        steps = np.maximum(self.output - 1, 0.0)
        if steps.sum() == 0:
            return float(self.prompt.mean())
        return float(((self.prompt + self.output / 2.0) * steps).sum() / steps.sum())


def prefill_rate(step: StepTimes, num: int, lengths: Lengths, slo: SLO) -> float:
    """Rate of ``num`` pooled prefill instances at which the share of TTFT met falls to the target.

    Waiting is that of M/G/k with an exponential tail; batching makes a request cost its share of
    the best batch.
    """
    alone = _prefill_latency_s(step, lengths.prompt)
    slack = slo.ttft_s - alone
    if (slack >= 0).mean() < slo.attainment:
        return 0.0
    stage = _amortised_stage_s(step, lengths.prompt)
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
        low, high = (rate, high) if met.mean() >= slo.attainment else (low, rate)
    return low


def decode_rate(step: StepTimes, num: int, lengths: Lengths, slo: SLO) -> float:
    """Rate of ``num`` decode instances at the largest batch that memory and TPOT allow."""
    steps = float(np.maximum(lengths.output - 1, 0.0).mean())
    if steps == 0:
        return math.inf
    batch, interval = largest_batch(step, lengths, slo)
    return num * step.num_stages * batch / interval / steps if batch else 0.0


def largest_batch(step: StepTimes, lengths: Lengths, slo: SLO) -> tuple[int, float]:
    """``(requests per micro-batch, seconds per token)`` at the limit of memory or TPOT."""
    sizes = np.arange(1, step.max_batch_size + 1)
    context = lengths.mean_context
    passes = step.decode_base_s[sizes] + step.decode_per_context_s[sizes] * sizes * context
    interval = np.maximum(passes + step.num_stages * step.stage_overhead_s, 1e-12)
    in_memory = sizes * step.num_stages * context <= step.kv_capacity_tokens
    allowed = in_memory & (interval <= slo.tpot_s)
    if not allowed.any():
        return 0, math.inf
    best = int(np.argmax(np.where(allowed, sizes / interval, 0.0)))
    return int(sizes[best]), float(interval[best])


def colocated_rate(
    step: StepTimes, num: int, lengths: Lengths, slo: SLO, chunk_tokens: int = 0
) -> float:
    """Rate of instances that do both: neither phase alone may be over its limit.

    Whole prompts take their time from decode; pieces may ride along at best for free.
    """
    prefill = prefill_rate(step, num, lengths, slo)
    decode = decode_rate(step, num, lengths, slo)
    if chunk_tokens or min(prefill, decode) == 0:
        return min(prefill, decode)
    batch, interval = largest_batch(step, lengths, slo)
    steps = float(np.maximum(lengths.output - 1, 0.0).mean())
    decode_s = steps * interval / (batch * step.num_stages) if steps else 0.0
    together = num / (float(_amortised_stage_s(step, lengths.prompt).mean()) + decode_s)
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

"""Rates by formula: cheap, never below what the simulator finds, and so fit to prune with."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from daskserve.planner.slo_classes import AnySLO, SLOClasses
from daskserve.planner.step_times import StepTimes
from daskserve.planner.workload import Workload

SAMPLE = 512
"""Requests that stand for a workload's demand."""
RAREST = 32
"""So many of them are of each class, as far as eight times the sample reaches."""
PREFILL_MARGIN = 1.2
DECODE_MARGIN = 1.15
"""How far the formulas may be below the simulator; tests hold them to it."""


@dataclass(frozen=True, eq=False)
class Demand:
    """Lengths and limits of a sample of requests.

    Parameters
    ----------
    prompt, output
        Tokens of each request.
    slo_class
        The class of each, by its place in ``slo``.
    most_tokens
        Prompt and output of the longest request of all, not only of the sample.
    """

    prompt: np.ndarray
    output: np.ndarray
    slo_class: np.ndarray
    slo: SLOClasses
    most_tokens: int

    @classmethod
    def of(cls, workload: Workload, slo: AnySLO) -> Demand:
        """Sampled evenly; of several classes each keeps its share."""
        slo = SLOClasses.of(slo)
        _, prompt, output = workload.arrays()
        index = slo.index_of(workload)
        most_tokens = int((prompt + output).max())
        by_class = np.argsort(index, kind="stable")
        counts = np.bincount(index, minlength=len(slo.names))
        rows = by_class[np.linspace(0, len(prompt) - 1, _sample_of(counts)).astype(np.int64)]
        prompt, output = prompt[rows].astype(np.float64), output[rows].astype(np.float64)
        return cls(prompt, output, index[rows], slo, most_tokens)

    @cached_property
    def steps(self) -> np.ndarray:
        """Decode steps of each request."""
        return np.maximum(self.output - 1.0, 0.0)

    @cached_property
    def mean_steps(self) -> float:
        return float(self.steps.mean())

    @cached_property
    def ttft_s(self) -> np.ndarray:
        """The limit of each request."""
        return self.slo.ttft_s[self.slo_class]

    @cached_property
    def class_targets(self) -> tuple[np.ndarray, np.ndarray]:
        """Requests and targets by class."""
        return np.bincount(self.slo_class), self.slo.attainment

    @cached_property
    def attainment(self) -> float:
        """The highest target of all classes."""
        return float(self.slo.attainment.max())

    @cached_property
    def pace_s(self) -> float:
        """TPOT that batches must keep: all classes share them, so the tightest limit counts.

        A class that would meet its target although it misses TPOT, because few of its requests
        have more than one token, does not count: a bound must not be too low.
        """
        decodes = np.array(
            [(self.output[self.slo_class == i] > 1).mean() for i in range(len(self.slo.names))]
        )
        counts = decodes > 1.0 - self.slo.attainment
        return float(self.slo.tpot_s[counts].min() if counts.any() else self.slo.tpot_s.max())

    @cached_property
    def mean_context(self) -> float:
        """Tokens of context of a request in decode, averaged over its steps."""
        steps = self.steps
        if steps.sum() == 0:
            return float(self.prompt.mean())
        return float(((self.prompt + self.output / 2.0) * steps).sum() / steps.sum())


def prefill_rate(step: StepTimes, num: int, demand: Demand) -> float:
    """Rate of ``num`` pooled prefill instances at which the share of TTFT met falls to the target.

    Waiting is that of M/G/k with an exponential tail; batching makes a request cost its share of
    a well-filled batch. A full pipeline moves at the pace of the longest prompt in it.
    """
    alone = np.array([step.latency_s(step.prefill_s(tokens)) for tokens in demand.prompt])
    stage = np.sort(_amortised_stage_s(step, demand.prompt))
    if stage.mean() == 0:
        return math.inf
    return _highest(
        lambda rate: _ttft_met(step, num, demand, alone, stage, rate), num / float(stage.mean())
    )


def _highest(holds: Callable[[float], bool], most: float) -> float:
    """The highest rate up to ``most`` that holds; 0 when none does."""
    low, high = 0.0, most
    if not holds(most * 1e-6):
        return 0.0
    for _ in range(40):
        rate = (low + high) / 2.0
        low, high = (rate, high) if holds(rate) else (low, rate)
    return low


def _ttft_met(
    step: StepTimes, num: int, demand: Demand, alone: np.ndarray, stage: np.ndarray, rate: float
) -> bool:
    """Whether enough requests get their first token in time at a rate.

    ``alone`` are the seconds of a request that waits for nobody, ``stage`` (sorted) the seconds
    that requests occupy a stage.
    """
    in_pipeline = 1.0
    if step.num_stages > 1:
        in_pipeline += (step.num_stages - 1) * rate * float(stage.mean()) / num
    pace, second = _largest_of(stage, in_pipeline)
    load = rate * pace / num
    if load >= 1.0:
        return False
    met = _chance_met(demand.ttft_s - alone, load, second / (2.0 * pace), num)
    # All wait in the same queues; each class has a target for its own requests.
    counts, targets = demand.class_targets
    return bool((np.bincount(demand.slo_class, met) / counts >= targets).all())


def _chance_met(slack: np.ndarray, load: float, residual_s: float, num: int) -> np.ndarray:
    """Chance of each request that its wait is below its slack."""
    waits = load ** math.sqrt(2.0 * (num + 1)) if num > 1 else load
    typical = residual_s / (num * (1.0 - load))
    met = 1.0 - waits * np.exp(-np.maximum(slack, 0.0) / typical)
    return np.where(slack >= 0, met, 0.0)


def _sample_of(counts: np.ndarray) -> int:
    """So many that the rarest of several classes is among them a few dozen times."""
    total = int(counts.sum())
    wanted = RAREST * total // max(int(counts.min()), 1) if len(counts) > 1 else 0
    return min(max(SAMPLE, min(wanted, 8 * SAMPLE)), total)


def _largest_of(ordered: np.ndarray, count: float) -> tuple[float, float]:
    """Mean and mean square of the largest of ``count`` draws."""
    below = np.arange(len(ordered) + 1) / len(ordered)
    weights = np.diff(below**count)
    return float(weights @ ordered), float(weights @ ordered**2)


def decode_rate(step: StepTimes, num: int, demand: Demand) -> float:
    """Rate of ``num`` decode instances at the largest batch that memory and TPOT allow."""
    steps = demand.mean_steps
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
    tpot_s = demand.pace_s
    in_memory = sizes * step.num_stages * context <= step.kv_capacity_tokens
    allowed = in_memory & (interval <= tpot_s)
    if not allowed.any():
        return 0, math.inf
    best = int(np.argmax(np.where(allowed, sizes / interval, 0.0)))
    return int(sizes[best]), float(interval[best])


def colocated_rate(step: StepTimes, num: int, demand: Demand, chunk_tokens: int = 0) -> float:
    """Rate of instances that do both phases.

    Prefill takes a share of the time. Whole prompts stop decoding meanwhile; in mixed steps of
    ``chunk_tokens`` decoding goes on at the pace of the larger step, which also reads the KV of
    what decodes.
    """
    most = decode_rate(step, num, demand)
    if chunk_tokens:
        mixed_s = step.prefill_s(float(chunk_tokens), 0.0)
        pieces = np.maximum(demand.prompt / chunk_tokens, step.prefill_s(1.0, 0.0) / mixed_s)
        work = pieces * mixed_s + step.prefill_quadratic_s * demand.prompt**2
        stage = np.sort(work) / step.num_stages
        alone = work
    else:
        alone = np.array([step.latency_s(step.prefill_s(tokens)) for tokens in demand.prompt])
        stage = np.sort(_amortised_stage_s(step, demand.prompt))

    mean_s = float(stage.mean())
    pace_s = step.latency_s(step.prefill_s(float(chunk_tokens), 0.0)) if chunk_tokens else 0.0

    def holds(rate: float) -> bool:
        share = rate / num * mean_s
        decoding = _decoding(step, demand, rate / num, share, pace_s)
        if decoding is None:
            return False
        # A prompt that finds a step under way waits for the first stage at least.
        pass_s, busy = decoding
        waits = busy * pass_s / step.num_stages / 2.0
        return _ttft_met(step, num, demand, alone + waits, stage, rate)

    return _highest(holds, min(most, num / max(mean_s, 1e-12)))


def _decoding(
    step: StepTimes, demand: Demand, rate: float, share: float, mixed_s: float
) -> tuple[float, float] | None:
    """Seconds of a decode pass, and the share of time with one, beside prefill's share.

    None when tokens come slower than TPOT or do not fit in memory. ``mixed_s`` is the pass in
    which decoding goes on during prefill, 0 when it stops.
    """
    if share >= 1.0:
        return None
    steps, context = demand.mean_steps, demand.mean_context
    batch = 1
    for _ in range(20):  # the batch that arrives while a token is made, to a fixed point
        decode_s = step.latency_s(step.decode_s(batch, batch * context))
        passes = (share / mixed_s if mixed_s else 0.0) + (1.0 - share) / max(decode_s, 1e-12)
        running = rate * steps / passes / step.num_stages
        if 1.0 / passes > demand.pace_s or running > step.max_batch_size:
            return None
        if running <= batch:
            break
        batch = min(math.ceil(running), step.max_batch_size)
    fits = batch * step.num_stages * context <= step.kv_capacity_tokens
    return (decode_s, min(1.0, running)) if fits else None


def _amortised_stage_s(step: StepTimes, prompt: np.ndarray) -> np.ndarray:
    """Seconds of one stage per request when it shares a batch as full as whole prompts allow."""
    unfilled = float((prompt**2).mean() / prompt.mean()) / 2.0
    filled = np.maximum(prompt, step.prefill_budget_tokens - unfilled)
    linear_s = np.array([step.prefill_s(tokens, 0.0, 0.0) for tokens in filled]) * prompt / filled
    overhead_s = step.stage_overhead_s * prompt / filled
    squares_s = step.prefill_quadratic_s * prompt**2
    own_s = squares_s + step.prefill_per_prompt_s
    return (linear_s + own_s) / step.num_stages + overhead_s

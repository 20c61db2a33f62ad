"""What steps take longer in mixed traffic, read out of the timelines of its requests.

They say when every request was in which step, and so what each step had to do. How much longer that
took than the same work alone is what instances cost each other that compute at the same time, on
memory and caches, and what the traffic between them costs; where there is one colocated instance,
what everything around it takes of its cores.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import nnls

from daskserve.calibrate.in_service import Answer
from daskserve.planner.latency.calibration import Sharing, Slowdown
from daskserve.planner.step_times import StepTimes

_MOST_IDLE = 0.05
"""Share of a prefill step in which decoding may pause and still count as beside it."""

_SOON_S = 0.001
"""Between the end of a step and the beginning of one that follows it."""

_LEAST_BESIDE = 0.2
"""Share of the tokens that must come beside prompts to tell anything."""


def sharing_of(
    rounds: Sequence[Sequence[Answer]], step: StepTimes, is_colocated: bool
) -> Sharing | None:
    """Means over rounds of traffic; None if there is nothing to read.

    Parameters
    ----------
    rounds
        All requests of each round.
    step
        What steps take in a service that makes one at a time.
    is_colocated
        One instance makes all steps. Else there is one of each role, and only times count in
        which the other was at work as well.
    """
    least = _least(is_colocated)
    added_s, following_s = prefill_added_s(rounds, step, is_colocated)
    step = replace(
        step,
        prefill_knots_s=step.prefill_knots_s + added_s,
        prefill_following_s=following_s,
    )
    prefill = [prefill_slowdown(one, step, is_colocated) for one in rounds]
    decode = [decode_slowdown(one, step, is_colocated) for one in rounds]
    of_prefill, of_decode = (
        [share for share in found if share is not None] for found in (prefill, decode)
    )
    if not of_prefill or not of_decode:
        return None
    return Sharing(
        prefill=_slowdown(of_prefill, least),
        decode=_slowdown(of_decode, least),
        prefill_added_s=added_s,
        prefill_following_s=following_s,
    )


def prefill_added_s(
    rounds: Sequence[Sequence[Answer]], step: StepTimes, is_colocated: bool = False
) -> tuple[float, float]:
    """Seconds that a prefill step takes longer in traffic: whatever its size, and when it follows.

    Receiving requests takes time of the same cores, in steps of one short prompt as in those of
    many; giving their KV away takes time of the next step, if there is one just then. The rest
    grows with the step, more or less than what it takes alone: all together have the least squared
    error relative to the steps.
    """
    steps = [one for answers in rounds for one in _beside(answers, step, is_colocated)]
    if not steps:
        return 0.0, 0.0
    taken_s = np.array([one.taken_s for one in steps])
    alone_s = np.array([one.alone_s for one in steps])
    follows = np.array([one.follows and not is_colocated for one in steps], float)
    matrix = np.stack([np.ones(len(steps)), follows, alone_s], axis=1) / taken_s[:, None]
    scale = np.where(matrix.any(axis=0), matrix.max(axis=0), 1.0)
    found, _ = nnls(matrix / scale, 1.0 - (1.0 + _least(is_colocated)) * matrix[:, 2])
    always_s, following_s, _ = (found / scale).tolist()
    return always_s, following_s


def prefill_slowdown(
    answers: Sequence[Answer], step: StepTimes, is_colocated: bool = False
) -> float | None:
    """Seconds of all prefill steps, apart those beside decoding, over what they take alone, less 1.

    None if there are none.
    """
    steps = _beside(answers, step, is_colocated)
    if not steps:
        return None
    return sum(one.taken_s for one in steps) / sum(one.alone_s for one in steps) - 1.0


@dataclass(frozen=True, slots=True)
class _PrefillStep:
    """``follows``: it began as another one ended."""

    taken_s: float
    alone_s: float
    follows: bool


def _beside(answers: Sequence[Answer], step: StepTimes, is_colocated: bool) -> list[_PrefillStep]:
    """Prefill steps, apart those beside decoding."""
    decoding = [(one.decode_at, one.ended_at) for one in answers]
    found, last_ended_at = [], float("-inf")
    for prompts in sorted(_prefill_steps(answers), key=lambda prompts: prompts[0].prefill_at):
        began_at, ended_at = prompts[0].prefill_at, prompts[0].first_token_at
        follows = began_at - last_ended_at < _SOON_S
        last_ended_at = ended_at
        beside_s = _covered_s(decoding, began_at, ended_at)
        if not is_colocated and beside_s < (1 - _MOST_IDLE) * (ended_at - began_at):
            continue
        lengths = [one.prompt_tokens for one in prompts]
        alone_s = step.prefill_s(sum(lengths), sum(n**2 for n in lengths), len(lengths))
        alone_s += step.prefill_following_s * follows
        found.append(_PrefillStep(ended_at - began_at, alone_s, follows))
    return found


def decode_slowdown(
    answers: Sequence[Answer], step: StepTimes, is_colocated: bool = False
) -> float | None:
    """How much longer decode steps must take for so many tokens to come.

    Apart: those while prompts were computed; None if too few were. A colocated instance decodes
    only while it computes no prompts.
    """
    alone, beside = _tokens_alone(answers, step)
    came = sum(one.num_gaps for one in answers)
    if is_colocated:
        return alone / came - 1.0 if came else None
    came_beside = came - alone
    if beside < _LEAST_BESIDE * came or came_beside <= 0:
        return None
    return beside / came_beside - 1.0


def _tokens_alone(answers: Sequence[Answer], step: StepTimes) -> tuple[float, float]:
    """Tokens that would have come at the pace of lone steps: while no prompts were computed, and
    while some were.

    Between two moments at which a request comes, goes, or a prefill step begins or ends, the
    batch stays the same.
    """
    prefilling = [(s[0].prefill_at, s[0].first_token_at) for s in _prefill_steps(answers)]
    decode_at = np.array([one.decode_at for one in answers])
    ended_at = np.array([one.ended_at for one in answers])
    first_context = np.array([one.prompt_tokens + 1 for one in answers], float)
    tokens_per_s = np.array([one.num_gaps for one in answers]) / (ended_at - decode_at)
    moments = np.unique([*decode_at, *ended_at, *np.ravel(prefilling)])
    tokens = [0.0, 0.0]
    for begin, end in zip(moments, moments[1:], strict=False):
        here = (decode_at <= begin) & (end <= ended_at)
        if not here.any():
            continue
        batch = int(here.sum())
        done = ((begin + end) / 2 - decode_at[here]) * tokens_per_s[here]
        step_s = step.decode_s(batch, float((first_context[here] + done).sum()))
        is_beside = any(first <= begin and end <= last for first, last in prefilling)
        tokens[is_beside] += float(batch * (end - begin) / step_s)
    return tokens[0], tokens[1]


def _prefill_steps(answers: Sequence[Answer]) -> list[list[Answer]]:
    """Prompts that began and ended at the same moments were computed in one step."""
    steps = defaultdict(list)
    for one in answers:
        steps[round(one.prefill_at, 4), round(one.first_token_at, 4)].append(one)
    return list(steps.values())


def _covered_s(spans: Sequence[tuple[float, float]], begin: float, end: float) -> float:
    """Seconds between ``begin`` and ``end`` that lie in any of the spans."""
    covered_s, reached = 0.0, begin
    for first, last in sorted(spans):
        first, last = max(first, reached), min(last, end)
        if last > first:
            covered_s += last - first
            reached = last
    return covered_s


def _least(is_colocated: bool) -> float:
    """Instances do not speed each other up, but a colocated one's steps may beat the fit."""
    return -1.0 if is_colocated else 0.0


def _slowdown(shares: Sequence[float], least: float) -> Slowdown:
    low, high = np.quantile(shares, (0.25, 0.75))
    mean = max(float(np.mean(shares)), least)
    return Slowdown(mean=mean, spread=float(high - low), num_repeats=len(shares))

"""The fewest instances that hold a rate together, for every way to split them.

Goodput per GPU of a lone instance misleads: instances that share one queue wait far less, so a
split that looks poor alone can need the fewest GPUs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from daskserve.errors import ClusterError
from daskserve.planner.search.best import WAVE
from daskserve.planner.search.objective import Objective
from daskserve.planner.search.simulated import SimulatedEvaluator, Task, check_rate, run_all
from daskserve.planner.search.units import Unit


@dataclass(frozen=True, slots=True)
class Pooled:
    """Copies of one-instance units, one count for each unit, that hold the rate phase by phase."""

    units: tuple[Unit, ...]
    counts: tuple[int, ...]

    @property
    def together(self) -> Unit:
        """All instances as one unit."""
        return _joined(self.units, self.counts)


def _joined(units: Sequence[Unit], counts: Sequence[int]) -> Unit:
    groups = tuple(
        group
        for unit, count in zip(units, counts, strict=True)
        for group in unit.times(count).groups
    )
    return Unit(groups, chunk_tokens=units[0].chunk_tokens)


@dataclass(frozen=True, slots=True, eq=False)
class CountTask:
    """Find the smallest count that holds a rate; ``tasks[i]`` has ``low + i`` instances."""

    tasks: tuple[Task, ...]
    low: int
    guess: int


def fewest_pooled(
    evaluator: SimulatedEvaluator,
    choices: Sequence[tuple[Unit, ...]],
    rate: float,
    objective: Objective,
    allow: Callable[[Unit], bool],
) -> list[Pooled]:
    """What needs the least weight for a rate, lightest first; empty when nothing holds it.

    Parameters
    ----------
    choices
        Units of one instance that go together: one for a phase or colocated instances, two for
        a prefill and a decode split that belong together. Each gets a count of its own.
    allow
        Whether that many instances may be used at all.

    Raises
    ------
    ClusterError
        The rate needs more than is allowed, whatever the choice.
    """
    ranges = {unit: _range(evaluator, unit, rate) for choice in choices for unit in choice}
    low = {unit: span[0] for unit, span in ranges.items() if span is not None}
    order = [choice for choice in choices if all(unit in low for unit in choice)]
    least = {choice: sum(low[one] * objective.weight(one) for one in choice) for choice in order}
    order.sort(key=least.__getitem__)
    smallest = {choice: _joined(choice, [low[unit] for unit in choice]) for choice in order}
    if order and not any(allow(smallest[choice]) for choice in order):
        raise ClusterError(f"needs {smallest[order[0]].num_gpus} GPUs or more")
    order = [choice for choice in order if allow(smallest[choice])]
    found: list[Pooled] = []
    best = math.inf
    while order:
        order = [choice for choice in order if least[choice] < best]
        wave, order = order[:WAVE], order[WAVE:]
        units = list(dict.fromkeys(unit for choice in wave for unit in choice))
        counts = dict(zip(units, smallest_counts(evaluator, units, rate), strict=True))
        for choice in wave:
            if all(counts[unit] for unit in choice):
                found.append(Pooled(choice, tuple(counts[unit] for unit in choice)))
        best = min((objective.weight(one.together) for one in found), default=math.inf)
    return sorted(found, key=lambda one: objective.weight(one.together))


def smallest_counts(evaluator: SimulatedEvaluator, units: Sequence[Unit], rate: float) -> list[int]:
    """How many of each one-instance unit hold the rate alone; 0 where no count does."""
    spans = [_range(evaluator, unit, rate) for unit in units]
    tasks = [
        _count_task(evaluator, unit, span, rate)
        for unit, span in zip(units, spans, strict=True)
        if span is not None
    ]
    counts = iter(run_all(evaluator.executor, fewest, tasks))
    return [next(counts) if span is not None else 0 for span in spans]


def _range(evaluator: SimulatedEvaluator, unit: Unit, rate: float) -> tuple[int, int] | None:
    """Least count by the bound, and by the formula itself; None when no count serves the rate."""
    sized = evaluator.sized
    if sized.bound(unit) <= 0:
        return None
    low = least_count(lambda n: sized.bound(unit.times(n)), rate)
    return low, max(low, least_count(lambda n: sized.evaluate([unit.times(n)])[0].rate, rate))


def least_count(rate_of: Callable[[int], float], rate: float) -> int:
    """Smallest count whose rate suffices; rates grow with the count, and are above 0 at 1."""
    high = 1
    while rate_of(high) < rate:
        high *= 2
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if rate_of(middle) >= rate else (middle, high)
    return high


def _count_task(
    evaluator: SimulatedEvaluator, unit: Unit, span: tuple[int, int], rate: float
) -> CountTask:
    low, guess = span
    effort = evaluator.effort.quick()
    counts = range(low, 2 * guess + 3)
    tasks = tuple(evaluator.task(unit.times(count), rate, effort) for count in counts)
    return CountTask(tasks, low, guess)


def fewest(task: CountTask) -> int:
    """The smallest count that holds the rate; 0 when even the largest does not."""
    answers: dict[int, bool] = {}

    def holds(index: int) -> bool:
        if index not in answers:
            answers[index] = check_rate(task.tasks[index]).holds
        return answers[index]

    index, last = task.guess - task.low, len(task.tasks) - 1
    if holds(index):
        while index > 0 and holds(index - 1):
            index -= 1
        return task.low + index
    # The formula is high by a third at most where it matters: a few large steps, then halving.
    step, below = 1, index
    while index < last and not holds(index):
        below, index = index, min(index + step, last)
        step *= 2
    if not holds(index):
        return 0
    while index - below > 1:
        middle = (below + index) // 2
        below, index = (below, middle) if holds(middle) else (middle, index)
    return task.low + index

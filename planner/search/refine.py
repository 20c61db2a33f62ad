"""Finds the fewest instances that hold a rate together, starting from a count per phase.

The counts of an algorithm come from instances measured alone: two phases that each meet 90 %
meet less together, while many instances share their queue and do better than one by one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from daskserve.core.instance import Role
from daskserve.planner.search.simulated import Check
from daskserve.planner.search.units import Unit

MAX_GROWTH = 2.0
"""Counts are raised to at most so many times the first guess, plus 2."""


@dataclass(frozen=True, slots=True)
class Refined:
    """The smallest deployment that was found to hold the rate.

    Parameters
    ----------
    unit
        The last that was looked at.
    answer
        Its check; when that failed, growing did not help.
    """

    unit: Unit
    answer: Check


def refine_counts(
    check: Callable[[Unit], Check], unit: Unit, weight: Callable[[Unit], float]
) -> Refined:
    """Raise the count of the phase that fails until all holds, then drop what is not needed.

    Parameters
    ----------
    check
        Whether a deployment holds the wanted rate.
    weight
        Heavier instances are dropped first.
    """
    most = {group.role: int(MAX_GROWTH * group.count) + 2 for group in unit.groups}
    answer = check(unit)
    while not answer.holds:
        grown = _grown(unit, answer, most)
        if grown is None:
            return Refined(unit, answer)
        unit = grown
        answer = check(unit)
    heaviest_first = sorted(
        unit.groups, key=lambda group: -weight(Unit((replace(group, count=1),)))
    )
    for role in [group.role for group in heaviest_first]:
        while (count := _count(unit, role)) > 1:
            smaller = _with_count(unit, role, count - 1)
            smaller_answer = check(smaller)
            if not smaller_answer.holds:
                break
            unit, answer = smaller, smaller_answer
    return Refined(unit, answer)


def _grown(unit: Unit, answer: Check, most: dict[Role, int]) -> Unit | None:
    """One more instance of the phase that limits; None when more cannot help."""
    roles = [group.role for group in unit.groups]
    if answer.limited_by == "ttft" and Role.PREFILL in roles:
        order = [Role.PREFILL]
    elif answer.limited_by == "tpot" and Role.DECODE in roles:
        order = [Role.DECODE]
    else:
        order = roles
    for role in order:
        count = _count(unit, role)
        if count < most[role]:
            return _with_count(unit, role, count + 1)
    return None


def _count(unit: Unit, role: Role) -> int:
    return sum(group.count for group in unit.groups if group.role is role)


def _with_count(unit: Unit, role: Role, count: int) -> Unit:
    groups = tuple(replace(g, count=count) if g.role is role else g for g in unit.groups)
    return replace(unit, groups=groups)

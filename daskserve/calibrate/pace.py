"""How fast the machine is now, beside how fast it was.

A virtual machine changes its pace by a tenth for minutes, and nothing in its CPU times shows it.
Lone engine steps do: what is measured at different times is comparable only beside them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np

from daskserve.calibrate.grid import Point
from daskserve.calibrate.steps import StepRig

_REPEATS = 9


class Pace:
    """Times a few lone engine steps again.

    Parameters
    ----------
    rig
        What has run these steps before, or one like it.
    then_s
        What steps took then.
    """

    def __init__(self, rig: StepRig, then_s: Mapping[Point, float]) -> None:
        self._rig = rig
        self._then_s = {point: then_s[point] for point in typical(then_s)}
        self.off()  # warms up

    def off(self) -> float:
        """How much longer they take now than then, as a share; negative: shorter."""
        ratios = [
            np.median([self._rig.seconds(point) for _ in range(_REPEATS)]) / then_s
            for point, then_s in self._then_s.items()
        ]
        return float(np.mean(ratios)) - 1.0


def typical(points: Collection[Point]) -> list[Point]:
    """Two prompts by themselves and two decode batches, neither the least nor the most of them."""
    chosen: list[Point] = []
    prompts = sorted(p for p in points if p.phase == "prefill" and p.batch == 1)
    decodes = sorted(p for p in points if p.phase == "decode")
    contexts = sorted({point.tokens for point in decodes})
    batches = [point for point in decodes if point.tokens == contexts[len(contexts) // 3]]
    for some in (prompts, batches):
        chosen += [some[len(some) // 3], some[len(some) // 2]]
    return chosen

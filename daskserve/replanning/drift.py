"""Whether the traffic is another one than the present split was chosen for: a sequential test.

The requests since the last look back (the reference, frozen after a while so that slow drift adds
up) are compared with those of the last seconds, by ranks: the place of each length among those of
the reference is uniform if nothing has changed, whatever the lengths' distribution, and its mean
over n requests is close to normal even for small n. The number of arrivals is compared with that
in windows of the same width in the reference, so that bursts which were there before are no
drift, by Student's t. All looks of an hour, windows and features share the stated number of false
alarms (Bonferroni), so it is an upper bound as long as requests are independent of each other;
where they are not (the same client sends alike requests in a row), the variance between blocks
that the reference shows is used instead of the smaller one of independent requests.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache

import numpy as np
from scipy import stats

from daskserve.errors import InvalidParameter
from daskserve.replanning.decision import Evidence

FEATURES = ("prompt_tokens", "output_tokens")
_SHORTEST_GAP = 1  # block between reference and window: what arrived there may be of either


@dataclass(frozen=True, slots=True)
class DriftSettings:
    """Parameters
    ----------
    false_alarms_per_hour
        Most alarms to be expected in an hour of traffic that does not change.
    block_s
        Seconds between two looks.
    windows
        Blocks of each window that is looked at.
    least_requests
        Fewer in a window tell nothing.
    least_reference
        Requests that the reference must hold before anything is tested.
    reference_blocks
        The reference is frozen when it has so many.
    least_groups
        Windows' widths that the reference must span before arrivals are compared.
    """

    false_alarms_per_hour: float = 0.001
    block_s: float = 5.0
    windows: tuple[int, ...] = (3, 12)
    least_requests: int = 20
    least_reference: int = 200
    reference_blocks: int = 360
    least_groups: int = 8

    def __post_init__(self) -> None:
        if not 0 < self.false_alarms_per_hour <= 1:
            value = self.false_alarms_per_hour
            raise InvalidParameter("false_alarms_per_hour", value, "must be above 0 and at most 1")
        if not self.block_s > 0:
            raise InvalidParameter("block_s", self.block_s, "must be above 0 seconds")

    @property
    def share(self) -> float:
        """Probability that one test, of one feature in one window, may have of a false alarm."""
        looks = 3600.0 / self.block_s
        return self.false_alarms_per_hour / (looks * len(self.windows) * (len(FEATURES) + 1))


@dataclass(frozen=True, slots=True)
class Drift:
    """An alarm.

    Parameters
    ----------
    at_s
        The end of the window in which the traffic was another one.
    last_s
        The beginning of its last block: what came since is surely of the new kind.
    """

    at_s: float
    last_s: float
    evidence: tuple[Evidence, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(one.name for one in self.evidence)


@dataclass(slots=True, eq=False)
class _Block:
    """What happened in ``block_s`` seconds: lengths by feature."""

    number: int
    num_arrived: int = 0
    lengths: dict[str, list[int]] = field(default_factory=lambda: {name: [] for name in FEATURES})
    ranks: dict[str, float] = field(default_factory=dict)
    """Sums of ranks among the frozen reference."""


class DriftTest:
    """Tests at the end of every block. Times are seconds of one clock, never going back."""

    def __init__(self, settings: DriftSettings = DriftSettings()) -> None:
        self.settings = settings
        self._current = _Block(-1)
        self._recent: deque[_Block] = deque()
        self._reference: list[_Block] = []
        self._sorted: dict[str, np.ndarray] = {}
        self._deff: dict[str, float] = {}
        self._arrivals: dict[int, tuple[float, float]] = {}
        self._is_frozen = False

    @property
    def is_ready(self) -> bool:
        """Whether the reference is large enough to test against."""
        return len(self._sorted) == len(FEATURES) and all(
            len(values) >= self.settings.least_reference for values in self._sorted.values()
        )

    def saw(
        self,
        now_s: float,
        num_arrived: int,
        prompt_tokens: Sequence[int],
        output_tokens: Sequence[int],
    ) -> Drift | None:
        """What came and what was served since the last call; an alarm, if there is one now.

        Parameters
        ----------
        num_arrived
            Requests that came.
        prompt_tokens, output_tokens
            Of the answers that ended.
        """
        drift = self._close_blocks(int(now_s // self.settings.block_s))
        block = self._current
        block.num_arrived += num_arrived
        block.lengths["prompt_tokens"] += prompt_tokens
        block.lengths["output_tokens"] += output_tokens
        return drift

    def restart(self, since_s: float) -> None:
        """The split suits the traffic since then: compare with that from now on."""
        number = int(since_s // self.settings.block_s)
        kept = [block for block in (*self._reference, *self._recent) if block.number >= number]
        for block in kept:
            block.ranks.clear()
        self._reference, self._recent = [], deque(kept)
        self._sorted, self._deff, self._is_frozen = {}, {}, False
        self._arrivals = {}
        self._shift()

    def _close_blocks(self, number: int) -> Drift | None:
        """The block of this number begins."""
        drift = None
        if self._current.number < 0 or number - self._current.number > self._most_recent:
            # The first one, or nobody looked for so long that there is nothing to go on with.
            self._recent.clear()
            self._current = _Block(number)
        while self._current.number < number:
            self._recent.append(self._current)
            self._current = _Block(self._current.number + 1)
            self._shift()
            drift = self._test() or drift
        return drift

    @property
    def _most_recent(self) -> int:
        return max(self.settings.windows) + _SHORTEST_GAP

    def _shift(self) -> None:
        """Blocks too old for a window join the reference, unless it is frozen."""
        grown = False
        while len(self._recent) > self._most_recent:
            block = self._recent.popleft()
            if not self._is_frozen:
                self._reference.append(block)
                grown = True
        if not grown:
            return
        for name in FEATURES:
            values = [value for block in self._reference for value in block.lengths[name]]
            self._sorted[name] = np.sort(np.array(values, np.float64))
        self._arrivals.clear()
        self._is_frozen = len(self._reference) >= self.settings.reference_blocks
        if self._is_frozen:
            self._deff = {name: self._design_effect(name) for name in FEATURES}

    def _test(self) -> Drift | None:
        if not self.is_ready:
            return None
        blocks, share = list(self._recent), self.settings.share
        for width in self.settings.windows:
            window = blocks[-width:]
            if len(window) < width:
                continue
            found = [self._compare(name, window, share) for name in FEATURES]
            found.append(self._compare_arrivals(window, share))
            evidence = tuple(one for one in found if one is not None)
            if evidence:
                seconds = self.settings.block_s
                end_s = (window[-1].number + 1) * seconds
                return Drift(end_s, window[-1].number * seconds, evidence)
        return None

    def _compare(self, name: str, window: list[_Block], share: float) -> Evidence | None:
        reference = self._sorted[name]
        count = sum(len(block.lengths[name]) for block in window)
        if count < self.settings.least_requests:
            return None
        mean = sum(self._ranks(name, block) for block in window) / count
        deff = self._deff.get(name, 1.0)
        variance = deff / 12.0 * (1.0 / count + 1.0 / len(reference))
        statistic = (mean - 0.5) / math.sqrt(variance)
        threshold = _normal_threshold(share)
        if abs(statistic) < threshold:
            return None
        now = float(np.mean([value for block in window for value in block.lengths[name]]))
        return Evidence(name, float(reference.mean()), now, statistic, threshold)

    def _ranks(self, name: str, block: _Block) -> float:
        """Sum of the places, 0..1, of a block's lengths among those of the reference."""
        known = block.ranks.get(name)
        if known is not None and self._is_frozen:
            return known
        reference, values = self._sorted[name], block.lengths[name]
        if not values:
            return 0.0
        low = np.searchsorted(reference, values, "left")
        high = np.searchsorted(reference, values, "right")
        total = float((low + high).sum()) / (2 * len(reference))
        if self._is_frozen:
            block.ranks[name] = total
        return total

    def _design_effect(self, name: str) -> float:
        """How much more the means of blocks vary than those of independent requests would."""
        filled = [block for block in self._reference if len(block.lengths[name]) >= 2]
        if len(filled) < 2 * self.settings.least_groups:
            return 1.0
        scores = []
        for block in filled:
            count = len(block.lengths[name])
            scores.append((self._ranks(name, block) / count - 0.5) * math.sqrt(12.0 * count))
            block.ranks.clear()
        return max(1.0, float(np.mean(np.square(scores))))

    def _compare_arrivals(self, window: list[_Block], share: float) -> Evidence | None:
        width, reference = len(window), self._reference
        num_groups = len(reference) // width
        if num_groups < self.settings.least_groups:
            return None
        before, variance = self._arrivals.get(width) or self._arrivals_in_groups(width, num_groups)
        now = sum(block.num_arrived for block in window)
        statistic = (now - before) / math.sqrt(variance * (1 + 1 / num_groups))
        threshold = _student_threshold(share, num_groups - 1)
        if abs(statistic) < threshold:
            return None
        seconds = width * self.settings.block_s
        return Evidence("rate_rps", before / seconds, now / seconds, statistic, threshold)

    def _arrivals_in_groups(self, width: int, num_groups: int) -> tuple[float, float]:
        """Mean and variance of the arrivals in windows of this width in the reference."""
        counts = [block.num_arrived for block in self._reference[: num_groups * width]]
        groups = np.array(counts).reshape(num_groups, width).sum(axis=1)
        # At least the variance of independent arrivals: a calm reference proves little.
        mean = float(groups.mean())
        variance = max(float(groups.var(ddof=1)), mean, 1.0)
        self._arrivals[width] = (mean, variance)
        return mean, variance


@cache
def _normal_threshold(share: float) -> float:
    return float(stats.norm.isf(share / 2))


@cache
def _student_threshold(share: float, freedom: int) -> float:
    return float(stats.t.isf(share / 2, freedom))

"""Steps that the model computes: begun in order, finished in the same order.

An instance with pipeline stages has as many open at once as it has stages, so that one is in each.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from daskserve.core.request import TokenLogprob
from daskserve.errors import InstanceLost
from daskserve.workers.forward import Runner
from daskserve.workers.kv_pool import KVPool
from daskserve.workers.sampler import logprobs, sample
from daskserve.workers.scores import Scores
from daskserve.workers.sequence import Sequence
from daskserve.workers.step import Step, pack

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Computed:
    """What came of a step, or what the model raised.

    Parameters
    ----------
    sequences
        Of its rows.
    tokens
        int64, one per row; `daskserve.workers.sampler.INVALID` where there is none.
    logprobs
        By row, where they are asked for.
    digests
        Of the pages of prompts that are handed over, by their owner.
    """

    sequences: list[Sequence]
    tokens: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    logprobs: dict[int, TokenLogprob] = field(default_factory=dict)
    digests: dict[int, np.ndarray] = field(default_factory=dict)
    error: Exception | None = None


@dataclass(frozen=True, slots=True)
class _Open:
    step: Step
    sequences: list[Sequence]
    asked: list[int]
    scores: Callable[[], Scores]
    digests: Callable[[], dict[int, np.ndarray]]


class OpenSteps:
    """Steps that are begun and not yet finished.

    Parameters
    ----------
    runner, pool
        What computes, over which pages.
    """

    def __init__(self, runner: Runner, pool: KVPool) -> None:
        self._runner, self._pool = runner, pool
        self._steps: deque[_Open] = deque()

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def is_full(self) -> bool:
        return len(self._steps) >= self._runner.max_open

    def begin(self, step: Step, hands_over: bool) -> None:
        """Have the model compute a step; its rows stay as they are until it is finished.

        ``hands_over``: other instances go on with its prompts, whose pages need digests.

        Raises
        ------
        InstanceLost
            A rank of the instance is gone: no further step can run.
        """
        sequences = step.sequences
        asked = [row for row, s in enumerate(sequences) if s.request.params.needs_logits]
        try:
            scores = self._runner.begin(pack(step, self._pool), asked)
            digests = self._begin_digests(step) if hands_over else dict
        except InstanceLost:
            raise
        except Exception as error:
            scores, digests = partial(_fail, error), dict
        self._steps.append(_Open(step, sequences, asked, scores, digests))

    def finish(self) -> tuple[Step, Computed]:
        """Wait for the oldest and choose its tokens; changes nothing that others look at.

        Raises
        ------
        InstanceLost
            As `begin`.
        """
        opened = self._steps.popleft()
        sequences = opened.sequences
        try:
            scores = opened.scores()
            digests = opened.digests()
            asked = [(row, sequences[row]) for row in opened.asked]
            draws = [
                (row, s.request.params, s.request.seed, len(s.output_ids))
                for row, s in asked
                if not s.request.params.is_greedy
            ]
            tokens = sample(scores, draws)
            named = [
                (row, s.request.params.logprobs)
                for row, s in asked
                if s.request.params.logprobs is not None
            ]
            values = logprobs(scores, named, tokens) if named else {}
        except InstanceLost:
            raise
        except Exception as error:
            logger.exception("an engine step of %d requests failed", len(sequences))
            return opened.step, Computed(sequences, error=error)
        return opened.step, Computed(sequences, tokens, values, digests)

    def _begin_digests(self, step: Step) -> Callable[[], dict[int, np.ndarray]]:
        ending = [chunk.sequence for chunk in step.chunks if chunk.is_last]
        owners = [s.owner for s in ending if s.request.params.max_tokens > 1]
        wait = self._pool.begin_digests([self._pool.pages_of(owner) for owner in owners])
        return lambda: dict(zip(owners, wait(), strict=True))


def _fail(error: Exception) -> Scores:
    raise error

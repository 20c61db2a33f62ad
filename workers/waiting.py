"""First come first served queue of sequences that wait for pages."""

from __future__ import annotations

from collections import deque
from itertools import islice

from daskserve.workers.sequence import Sequence, State


class WaitingQueue:
    """Sequences without pages, in order of arrival; a preempted one returns to the front."""

    def __init__(self) -> None:
        self._queue: deque[Sequence] = deque()
        self.num_tokens = 0
        """Prompt and output tokens of all that wait."""

    def __len__(self) -> int:
        return len(self._queue)

    def push(self, sequence: Sequence) -> None:
        sequence.state = State.WAITING
        self._queue.append(sequence)
        self.num_tokens += sequence.num_tokens

    def push_front(self, sequence: Sequence) -> None:
        sequence.state = State.WAITING
        self._queue.appendleft(sequence)
        self.num_tokens += sequence.num_tokens

    def pop(self) -> Sequence:
        sequence = self._queue.popleft()
        self.num_tokens -= sequence.num_tokens
        return sequence

    def remove(self, sequence: Sequence) -> None:
        self._queue.remove(sequence)
        self.num_tokens -= sequence.num_tokens

    def lengths(self, limit: int) -> list[int]:
        """Tokens of the first ``limit`` sequences."""
        return [sequence.num_tokens for sequence in islice(self._queue, max(limit, 0))]

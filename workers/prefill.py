"""What a PREFILL instance computes next: prompts in token-budget batches (DistServe 4.3)."""

from __future__ import annotations

from daskserve.scheduling.batching import prefill_batch_size
from daskserve.workers.kv_pool import KVPool
from daskserve.workers.sequence import Sequence, State
from daskserve.workers.step import Chunk, Step
from daskserve.workers.waiting import WaitingQueue


class PrefillScheduler:
    """First come first served; prompts wait while finished KV fills the pool (back-pressure).

    Parameters
    ----------
    pool
        Pages for prompts, and for finished KV until it is pulled.
    budget_tokens
        L_m: prompts are batched up to this many tokens, a longer one runs alone.
    max_requests
        Most prompts in one step.
    """

    def __init__(self, pool: KVPool, budget_tokens: int, max_requests: int) -> None:
        self.waiting = WaitingQueue()
        self.num_active = 0
        self._pool = pool
        self._budget_tokens = budget_tokens
        self._max_requests = max_requests

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits or is computed."""
        return self.num_active == 0 and len(self.waiting) == 0

    def add(self, sequence: Sequence) -> None:
        self.waiting.push(sequence)

    def remove(self, sequence: Sequence) -> None:
        if sequence.state is State.WAITING:
            self.waiting.remove(sequence)
        else:
            self._pool.free(sequence.owner)
            self.num_active -= 1

    def next_step(self) -> Step | None:
        count = prefill_batch_size(
            self.waiting.lengths(self._max_requests),
            self._budget_tokens,
            self._pool.num_free,
            self._pool.block_size,
            self._max_requests,
        )
        sequences = [self.waiting.pop() for _ in range(count)]
        for sequence in sequences:
            sequence.state = State.COMPUTING
            self._pool.allocate(sequence.new_owner(), self._pool.blocks_for(sequence.num_tokens))
        self.num_active += count
        return Step([Chunk(s, s.num_tokens) for s in sequences]) if sequences else None

    def ended(self, step: Step) -> None:
        """The step is computed; its prompts are handed over or removed one by one."""

    def hand_over(self, sequence: Sequence) -> None:
        """The prompt is computed; its pages now belong to the burst buffer."""
        sequence.state = State.DONE
        self.num_active -= 1

"""What a DECODE or COLOCATED instance computes next: continuous batching over a paged pool.

Sequences come first come first served: DECODE reserves pages and has the KV pulled into them
while other requests decode; COLOCATED computes prompts itself, whole prompts first or in chunks
that ride along with decode steps. When the pool is full the last admitted one is preempted and
computed again later.
"""

from __future__ import annotations

import itertools

from daskserve.core.instance import EngineConfig, Role
from daskserve.scheduling.batching import (
    NONE,
    chunk_tokens,
    decode_admissions,
    preemption_victim,
    prefill_batch_size,
)
from daskserve.workers.decode_batch import DecodeBatch
from daskserve.workers.kv_pool import AccountingError, KVPool
from daskserve.workers.sequence import Sequence, State
from daskserve.workers.step import Chunk, Step
from daskserve.workers.waiting import WaitingQueue


class ContinuousScheduler:
    """Sequences from the queue into the decode batch.

    Parameters
    ----------
    pool
        The instance's KV pages.
    role
        DECODE or COLOCATED.
    config
        Batch size and chunk size.
    budget_tokens
        L_m, for prompts that are computed here in steps of their own.
    """

    def __init__(self, pool: KVPool, role: Role, config: EngineConfig, budget_tokens: int) -> None:
        self.waiting = WaitingQueue()
        self.computing: list[Sequence] = []
        self.running = DecodeBatch(config.max_batch_size, pool.block_size)
        self.new_pulls: list[Sequence] = []
        """Sequences whose pages were just reserved: the engine has their pulls started."""
        self._pulls: dict[int, Sequence] = {}
        self._pool = pool
        self._role = role
        self._max_batch = config.max_batch_size
        self._chunk = config.chunk_tokens if role is Role.COLOCATED else None
        self._budget_tokens = budget_tokens
        self._admissions = itertools.count(1)
        self._num_pulling = 0

    @property
    def num_active(self) -> int:
        """Sequences with pages: pulling, computing and running."""
        return self._num_pulling + len(self.computing) + len(self.running)

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits or runs, and nothing writes to pages of what was aborted."""
        return self.num_active == 0 and not self._pulls and len(self.waiting) == 0

    def add(self, sequence: Sequence) -> None:
        self.waiting.push(sequence)

    def remove(self, sequence: Sequence) -> None:
        if sequence.state is State.WAITING:
            self.waiting.remove(sequence)
        elif sequence.state is State.PULLING:
            self._num_pulling -= 1  # the pages stay reserved until the pull has ended
        else:
            self._leave(sequence)

    def next_step(self) -> Step | None:
        can_decode = self._grow() and len(self.running) > 0
        if self._role is Role.DECODE:
            self.admit_decodes()
        else:
            self._admit_prompts()
        chunks = self._chunked() if self._chunk else self._whole()
        if chunks and not self._chunk:
            return Step(chunks)
        if chunks or can_decode:
            return Step(chunks, self.running if can_decode else None)
        return None

    def start_decoding(self, sequence: Sequence) -> None:
        """All tokens but the last are in the pages: decode from the next step on."""
        if sequence.state is State.COMPUTING:
            self.computing.remove(sequence)
        sequence.state = State.RUNNING
        self.running.add(sequence, self._pool.pages_of(sequence.owner))

    def pull_ended(self, owner: int, succeeded: bool, transfer_s: float) -> None:
        """A pull into the pages of ``owner`` ended; nothing writes to them any more."""
        sequence = self._pulls.pop(owner)
        sequence.kv_transfer_s += transfer_s
        if sequence.state is not State.PULLING or sequence.owner != owner:
            self._pool.free(owner)  # aborted meanwhile
            return
        self._num_pulling -= 1
        if succeeded:
            sequence.num_computed = sequence.num_tokens - 1
            self.start_decoding(sequence)
        else:
            sequence.lose_kv()
            sequence.state = State.COMPUTING
            self.computing.append(sequence)

    def admit_decodes(self) -> None:
        """Reserve pages for those that have room now; does not touch what runs."""
        lengths = self.waiting.lengths(self._max_batch - self.num_active)
        count = decode_admissions(
            [self._pool.blocks_for(length) for length in lengths],
            self._pool.num_free,
            self.num_active,
            self._max_batch,
            reserve_blocks=len(self.running),
        )
        for sequence in self._reserve(count):
            if sequence.handle is None:
                sequence.state = State.COMPUTING
                self.computing.append(sequence)
            else:
                sequence.state = State.PULLING
                self._num_pulling += 1
                self._pulls[sequence.owner] = sequence
                self.new_pulls.append(sequence)

    def _admit_prompts(self) -> None:
        if self._chunk is None:
            self._compute(self._count_prompts(self._max_batch, self._budget_tokens))
            return
        unfinished = sum(sequence.num_uncomputed for sequence in self.computing)
        budget = self._chunk - len(self.running) - unfinished
        # One by one: the last prompt may begin in this step and end in a later one.
        while (budget > 0 or not self.computing) and self._count_prompts(1, 1):
            budget -= self._compute(1)

    def _count_prompts(self, limit: int, budget_tokens: int) -> int:
        """How many prompts may be admitted now, at most ``limit``."""
        slots = min(self._max_batch - self.num_active, limit)
        # One page for each running request stays free, so that a new prompt does not at once
        # preempt what runs.
        free = self._pool.num_free - len(self.running)
        lengths = self.waiting.lengths(slots)
        return prefill_batch_size(lengths, budget_tokens, free, self._pool.block_size, slots)

    def _compute(self, count: int) -> int:
        """Move the first waiting sequences to those that are computed; their tokens."""
        sequences = self._reserve(count)
        for sequence in sequences:
            sequence.state = State.COMPUTING
        self.computing += sequences
        return sum(sequence.num_tokens for sequence in sequences)

    def _reserve(self, count: int) -> list[Sequence]:
        sequences = [self.waiting.pop() for _ in range(count)]
        for sequence in sequences:
            sequence.admission = next(self._admissions)
            self._pool.allocate(sequence.new_owner(), self._pool.blocks_for(sequence.num_tokens))
        return sequences

    def _whole(self) -> list[Chunk]:
        lengths = [sequence.num_uncomputed for sequence in self.computing]
        # Their pages are reserved already: only the token budget limits the step.
        count = prefill_batch_size(
            lengths, self._budget_tokens, self._pool.num_blocks, self._pool.block_size, len(lengths)
        )
        return [Chunk(s, s.num_uncomputed) for s in self.computing[:count]]

    def _chunked(self) -> list[Chunk]:
        chunks: list[Chunk] = []
        step_tokens = len(self.running)
        for sequence in self.computing:
            if chunks and step_tokens >= self._chunk:
                break
            size = chunk_tokens(sequence.num_uncomputed, self._chunk, step_tokens)
            chunks.append(Chunk(sequence, size))
            step_tokens += size
        return chunks

    def _grow(self) -> bool:
        """Give every running row room for its next token; False if the step must wait."""
        for sequence in self.running.short_of_pages():
            while sequence.state is State.RUNNING:
                page = self._pool.extend(sequence.owner)
                if page is not None:
                    self.running.add_page(sequence, page)
                    break
                candidates = [*self.running.sequences, *self.computing]
                victim = preemption_victim([c.admission for c in candidates])
                if victim != NONE:
                    self._preempt(candidates[victim])
                elif self._pulls:
                    return False  # alone: pages come free or a victim appears when a pull ends
                else:
                    raise AccountingError(f"{sequence.request.request_id} alone fills the pool")
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self._leave(sequence)
        sequence.lose_kv()
        self.waiting.push_front(sequence)

    def _leave(self, sequence: Sequence) -> None:
        if sequence.state is State.RUNNING:
            self.running.remove(sequence)
        else:
            self.computing.remove(sequence)
        self._pool.free(sequence.owner)

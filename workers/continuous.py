"""What a DECODE or COLOCATED instance computes next: continuous batching over a paged pool.

Sequences come first come first served: DECODE reserves pages and has the KV pulled into them
while other requests decode; COLOCATED computes prompts itself, whole prompts first or in chunks
that ride along with decode steps. When the pool is full the last admitted one is preempted and
computed again later. Where several steps may be open they are of different waves, which share the
queue and the pool; what is in an open step is left alone.
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
from daskserve.workers.kv_pool import AccountingError, KVPool
from daskserve.workers.sequence import Sequence, State
from daskserve.workers.step import Chunk, Step
from daskserve.workers.waiting import WaitingQueue
from daskserve.workers.wave import Wave


class ContinuousScheduler:
    """Sequences from the queue into the decode batches.

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
    num_waves
        Most steps that may be open at once.
    """

    def __init__(
        self,
        pool: KVPool,
        role: Role,
        config: EngineConfig,
        budget_tokens: int,
        num_waves: int = 1,
    ) -> None:
        self.waiting = WaitingQueue()
        self.new_pulls: list[Sequence] = []
        """Sequences whose pages were just reserved: the engine has their pulls started."""
        max_rows = -(-config.max_batch_size // num_waves)
        self._waves = [Wave(max_rows, pool.block_size) for _ in range(num_waves)]
        self._turns = list(self._waves)
        self._pulls: dict[int, Sequence] = {}
        self._pool = pool
        self._role = role
        self._max_batch = config.max_batch_size
        self._chunk = config.chunk_tokens if role is Role.COLOCATED else None
        self._budget_tokens = budget_tokens
        self._admissions = itertools.count(1)

    @property
    def num_active(self) -> int:
        """Sequences with pages: pulling, computing and running."""
        return sum(wave.num_members for wave in self._waves)

    @property
    def num_running(self) -> int:
        """Rows of the decode batches."""
        return sum(len(wave.running) for wave in self._waves)

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
            sequence.wave.num_members -= 1  # the pages stay reserved until the pull has ended
        else:
            self._leave(sequence)

    def next_step(self) -> Step | None:
        """Of the wave whose last step is longest ago; an empty one only takes what comes new."""
        busy = [wave for wave in self._turns if wave.num_members]
        empty = [wave for wave in self._waves if not wave.num_members]
        for wave in (*busy, *empty):
            step = None if wave.is_open else self._next_of(wave)
            if step is not None:
                wave.is_open = True
                self._turns.remove(wave)
                self._turns.append(wave)
                return step
        return None

    def _next_of(self, wave: Wave) -> Step | None:
        can_decode = self._grow(wave) and len(wave.running) > 0
        if self._role is Role.DECODE:
            self.admit_decodes()
        else:
            self._admit_prompts(wave)
        chunks = self._chunked(wave) if self._chunk else self._whole(wave)
        if chunks and not self._chunk:
            return Step(chunks, wave=wave)
        if chunks or can_decode:
            return Step(chunks, wave.running if can_decode else None, wave)
        return None

    def ended(self, step: Step) -> None:
        """The step is computed: its rows may change."""
        step.wave.end_step()

    def start_decoding(self, sequence: Sequence) -> None:
        """All tokens but the last are in the pages: decode from the next step on."""
        wave = sequence.wave
        if sequence.state is State.COMPUTING:
            wave.computing.remove(sequence)
        sequence.state = State.RUNNING
        wave.join(sequence, self._pool.pages_of(sequence.owner))

    def pull_ended(self, owner: int, succeeded: bool, transfer_s: float) -> None:
        """A pull into the pages of ``owner`` ended; nothing writes to them any more."""
        sequence = self._pulls.pop(owner)
        sequence.kv_transfer_s += transfer_s
        if sequence.state is not State.PULLING or sequence.owner != owner:
            self._pool.free(owner)  # aborted meanwhile
            return
        if succeeded:
            sequence.num_computed = sequence.num_tokens - 1
            self.start_decoding(sequence)
        else:
            sequence.lose_kv()
            self._start_computing(sequence)

    def admit_decodes(self) -> None:
        """Reserve pages for those that have room now; does not touch what runs."""
        lengths = self.waiting.lengths(self._max_batch - self.num_active)
        count = decode_admissions(
            [self._pool.blocks_for(length) for length in lengths],
            self._pool.num_free,
            self.num_active,
            self._max_batch,
            reserve_blocks=self.num_running,
        )
        for _ in range(count):
            sequence = self._reserve(min(self._waves, key=lambda wave: wave.num_members))
            if sequence.handle is None:
                self._start_computing(sequence)
            else:
                sequence.state = State.PULLING
                self._pulls[sequence.owner] = sequence
                self.new_pulls.append(sequence)

    def _admit_prompts(self, wave: Wave) -> None:
        if self._chunk is None:
            self._compute(wave, self._count_prompts(wave, self._max_batch, self._budget_tokens))
            return
        unfinished = sum(sequence.num_uncomputed for sequence in wave.computing)
        budget = self._chunk - len(wave.running) - unfinished
        # One by one: the last prompt may begin in this step and end in a later one.
        while (budget > 0 or not wave.computing) and self._count_prompts(wave, 1, 1):
            budget -= self._compute(wave, 1)

    def _count_prompts(self, wave: Wave, limit: int, budget_tokens: int) -> int:
        """How many prompts may be admitted now, at most ``limit``."""
        room = min(self._max_batch - self.num_active, wave.max_rows - wave.num_members)
        slots = min(room, limit)
        # One page for each running request stays free, so that a new prompt does not at once
        # preempt what runs.
        free = self._pool.num_free - self.num_running
        lengths = self.waiting.lengths(slots)
        return prefill_batch_size(lengths, budget_tokens, free, self._pool.block_size, slots)

    def _compute(self, wave: Wave, count: int) -> int:
        """Move the first waiting sequences to those that are computed; their tokens."""
        sequences = [self._reserve(wave) for _ in range(count)]
        for sequence in sequences:
            self._start_computing(sequence)
        return sum(sequence.num_tokens for sequence in sequences)

    def _reserve(self, wave: Wave) -> Sequence:
        """Give the first waiting sequence its pages, and its place in a wave."""
        sequence = self.waiting.pop()
        sequence.admission = next(self._admissions)
        sequence.wave = wave
        wave.num_members += 1
        self._pool.allocate(sequence.new_owner(), self._pool.blocks_for(sequence.num_tokens))
        return sequence

    def _start_computing(self, sequence: Sequence) -> None:
        sequence.state = State.COMPUTING
        sequence.wave.computing.append(sequence)

    def _whole(self, wave: Wave) -> list[Chunk]:
        lengths = [sequence.num_uncomputed for sequence in wave.computing]
        # Their pages are reserved already: only the token budget limits the step.
        count = prefill_batch_size(
            lengths, self._budget_tokens, self._pool.num_blocks, self._pool.block_size, len(lengths)
        )
        return [Chunk(s, s.num_uncomputed) for s in wave.computing[:count]]

    def _chunked(self, wave: Wave) -> list[Chunk]:
        chunks: list[Chunk] = []
        step_tokens = len(wave.running)
        for sequence in wave.computing:
            if chunks and step_tokens >= self._chunk:
                break
            size = chunk_tokens(sequence.num_uncomputed, self._chunk, step_tokens)
            chunks.append(Chunk(sequence, size))
            step_tokens += size
        return chunks

    def _grow(self, wave: Wave) -> bool:
        """Give every running row room for its next token; False if the step must wait."""
        for sequence in wave.running.short_of_pages():
            while sequence.state is State.RUNNING:
                page = self._pool.extend(sequence.owner)
                if page is not None:
                    wave.running.add_page(sequence, page)
                    break
                candidates = self._preemptible()
                victim = preemption_victim([c.admission for c in candidates])
                if victim != NONE:
                    self._preempt(candidates[victim])
                elif self._pulls or self.num_active > 1:
                    # Alone beside pulls and open steps: pages come free or a victim appears when
                    # one of them ends.
                    return False
                else:
                    raise AccountingError(f"{sequence.request.request_id} alone fills the pool")
        return True

    def _preemptible(self) -> list[Sequence]:
        """Who computes or runs, but for those in open steps."""
        waves = [wave for wave in self._waves if not wave.is_open]
        return [s for wave in waves for s in (*wave.running.sequences, *wave.computing)]

    def _preempt(self, sequence: Sequence) -> None:
        self._leave(sequence)
        sequence.lose_kv()
        self.waiting.push_front(sequence)

    def _leave(self, sequence: Sequence) -> None:
        wave = sequence.wave
        if sequence.state is State.RUNNING:
            wave.leave(sequence)
        else:
            wave.computing.remove(sequence)
        wave.num_members -= 1
        self._pool.free(sequence.owner)

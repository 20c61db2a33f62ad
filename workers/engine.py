"""The step loop of one instance: decide, run the model, sample, tell.

All of it happens on one thread and never waits: results, token deltas and requests for pulls
are put into ``events``, and whoever drives the engine takes them from there.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from daskserve.core.instance import EngineConfig, InstanceLoad, Role
from daskserve.core.request import (
    Completion,
    FinishReason,
    Prefilled,
    TokenDelta,
    TokenLogprob,
)
from daskserve.errors import DaskserveError, EngineStepFailed, RequestCancelled
from daskserve.text.detokenizer import Detokenizer
from daskserve.text.tokenizer import Tokenizer
from daskserve.workers.admission import check_fits, usable_handle
from daskserve.workers.continuous import ContinuousScheduler
from daskserve.workers.forward import Runner
from daskserve.workers.holding import BurstBuffer
from daskserve.workers.kv_pool import KVPool
from daskserve.workers.open_steps import Computed, OpenSteps
from daskserve.workers.outcome import completion, prefilled
from daskserve.workers.prefill import PrefillScheduler
from daskserve.workers.roles import scheduler_for
from daskserve.workers.sampler import INVALID
from daskserve.workers.sequence import Sequence, State
from daskserve.workers.step import Step


@dataclass(frozen=True, slots=True)
class Reserved:
    """Pages are reserved: pull the sequence's KV into them, then call ``Engine.pull_ended``."""

    owner: int
    pages: tuple[int, ...]


Event = tuple[Sequence, TokenDelta | Completion | Prefilled | Reserved | DaskserveError]


class Engine:
    """Runs the requests of one instance. One thread only, except ``holding`` and ``load``; while
    it is in `begin` or `finish`, another may call `add_early`.

    A step is decided by `schedule`, begun, finished and concluded. Several may be open, of
    different requests, where the runner computes in stages; they end in the order in which they
    began.

    Parameters
    ----------
    runner
        The model, real or mock.
    pool
        KV pages; bound to the runner here.
    role
        What kind of instance this is.
    config
        Batch sizes and time limits.
    tokenizer
        For stop strings and text.
    budget_tokens
        L_m, see ``EngineConfig.prefill_budget_tokens``.
    kv_layout
        Fingerprint of the pool, see `daskserve.workers.kv_pool.kv_layout`.
    clock
        Monotonic seconds.
    """

    def __init__(
        self,
        runner: Runner,
        pool: KVPool,
        role: Role,
        config: EngineConfig,
        tokenizer: Tokenizer,
        *,
        budget_tokens: int,
        kv_layout: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.runner, self.pool, self.config = runner, pool, config
        self.tokenizer, self.clock = tokenizer, clock
        self.budget_tokens, self.kv_layout = budget_tokens, kv_layout
        self.clock_offset_s = 0.0
        self.events: list[Event] = []
        self.load = InstanceLoad(free_kv_blocks=pool.num_free)
        self.holding = BurstBuffer(
            kv_layout, config.kv_lease_s, config.kv_pull_timeout_s, pool.home
        )
        self.role = role
        self.open_steps = OpenSteps(runner, pool)
        self.scheduler = self._new_scheduler(role)
        self._sequences: dict[str, Sequence] = {}
        self._num_steps = self._num_finished = self._num_tokens = 0
        runner.bind(pool.pages)

    @property
    def num_sequences(self) -> int:
        """Requests that are neither finished nor held."""
        return len(self._sequences)

    def sequences(self) -> list[Sequence]:
        """The requests that are neither finished nor held."""
        return list(self._sequences.values())

    def become(self, role: Role) -> bool:
        """Have another role from now on; False while there is still work of the old one.

        Weights and pool stay as they are, and held KV goes on being held until it is pulled.
        """
        if self._sequences or len(self.open_steps) or not self.scheduler.is_idle:
            return False
        self.role = role
        self.scheduler = self._new_scheduler(role)
        return True

    def add(self, sequence: Sequence) -> None:
        """Queue a request; an earlier one of the same id is superseded and ends as cancelled.

        With a handle, KV that is held for it stays: this instance may have prefilled it itself.
        """
        request = sequence.request
        if sequence.handle is None:
            self.release(request.request_id, None)
        self._end_if_there(request.request_id, None)
        try:
            check_fits(sequence, self.role, self.runner.shape, self.pool)
        except DaskserveError as error:
            sequence.state = State.DONE
            self.events.append((sequence, error))
            return
        if sequence.handle is not None and not usable_handle(sequence, self.kv_layout):
            sequence.lose_kv()
        if sequence.streams or request.params.stop:
            sequence.detokenizer = Detokenizer(self.tokenizer, request.params.stop)
            for token_id in sequence.output_ids:
                sequence.detokenizer.push(token_id)
        self._sequences[request.request_id] = sequence
        self.scheduler.add(sequence)
        self.publish_load()

    def add_early(self, sequence: Sequence) -> bool:
        """Queue a request while a step is computed, so that its pull runs beside it.

        Otherwise its pages would be reserved after this step, it would miss the next one too,
        and its caller waited a whole step longer. False: not possible, use `add` later.
        """
        if self.role is not Role.DECODE or sequence.request.request_id in self._sequences:
            return False
        self.add(sequence)
        self.scheduler.admit_decodes()
        self._ask_for_pulls()
        self.publish_load()
        return True

    def abort(self, request_id: str, error: DaskserveError | None = None) -> None:
        """End a request in whatever state; unknown ids are ignored."""
        self.release(request_id, None)
        self._end_if_there(request_id, error)

    def _end_if_there(self, request_id: str, error: DaskserveError | None) -> None:
        sequence = self._sequences.get(request_id)
        if sequence is not None:
            self._end(sequence, error or RequestCancelled(f"request {request_id} was cancelled"))
            self.publish_load()

    def abort_sequence(self, sequence: Sequence) -> None:
        """End this very submission of a request, not a later one of the same id."""
        if self._sequences.get(sequence.request.request_id) is sequence:
            self.abort(sequence.request.request_id)

    def abort_all(self, error: DaskserveError) -> None:
        """End every request and stop holding KV."""
        for sequence in self.sequences():
            self._end(sequence, error)
        for owner in self.holding.expire(float("inf")):
            self.pool.free(owner)
        self.publish_load()

    def release(self, request_id: str, secret: bytes | None) -> None:
        """Stop holding a request's KV; a wrong secret or an unknown id changes nothing."""
        owner = self.holding.take(request_id, secret)
        if owner is not None:
            self.pool.free(owner)
            self.publish_load()

    def pull_ended(self, owner: int, succeeded: bool, transfer_s: float) -> None:
        """The pull into the pages of ``owner`` is over, and nothing writes to them any more.

        Only between steps, as everything but `add_early`.
        """
        self.pool.end_pull(owner, succeeded)
        self.scheduler.pull_ended(owner, succeeded, transfer_s)
        self.publish_load()

    def schedule(self) -> Step | None:
        """Decide what to compute next; None when there is nothing now, or no step more may open.

        Take the events before beginning the step: the pulls that it asks for then run beside it.
        """
        for owner in self.holding.expire(self.clock()):
            self.pool.free(owner)
        step = None if self.open_steps.is_full else self.scheduler.next_step()
        self._ask_for_pulls()
        self.publish_load()
        return step

    def begin(self, step: Step) -> None:
        """Have the model compute what `schedule` gave (InstanceLost)."""
        self._note_start(step.sequences)
        self.open_steps.begin(step, hands_over=self.role is Role.PREFILL)

    def finish(self) -> tuple[Step, Computed]:
        """Wait for the oldest open step (InstanceLost); conclude it next."""
        return self.open_steps.finish()

    def conclude(self, step: Step, computed: Computed) -> None:
        """Give out the tokens; what the model raised fails the requests of this step only."""
        if computed.error is None and step.decode is not None:
            step.decode.advance(computed.tokens[: len(step.decode)])
        self.scheduler.ended(step)
        if computed.error is not None:
            cause = f"{type(computed.error).__name__}: {computed.error}"
            for sequence in computed.sequences:
                if sequence.state is not State.DONE:
                    self._end(sequence, EngineStepFailed(f"the engine step raised {cause}"))
        else:
            self._advance(step, computed)
        self._num_steps += 1
        self.publish_load()

    def execute(self, step: Step) -> None:
        """Compute a step from beginning to end, while no other is open."""
        self.begin(step)
        self.conclude(*self.finish())

    def publish_load(self) -> None:
        """Renew ``load``, which other threads read."""
        waiting = self.scheduler.waiting
        self.load = InstanceLoad(
            num_waiting=len(waiting),
            num_running=self.scheduler.num_active,
            num_holding=len(self.holding),
            waiting_tokens=waiting.num_tokens,
            used_kv_blocks=self.pool.num_used,
            free_kv_blocks=self.pool.num_free,
            num_steps=self._num_steps,
            num_finished=self._num_finished,
            num_tokens=self._num_tokens,
            bubble_share=self.runner.bubble_share,
        )

    def service_now(self) -> float:
        """Seconds on the clock of ``Request.submitted_at``."""
        return self.clock() + self.clock_offset_s

    def _new_scheduler(self, role: Role) -> PrefillScheduler | ContinuousScheduler:
        num_waves = self.runner.max_open
        return scheduler_for(role, self.pool, self.config, self.budget_tokens, num_waves)

    def _ask_for_pulls(self) -> None:
        if self.role is not Role.DECODE:
            return
        for sequence in self.scheduler.new_pulls:
            pages = tuple(self.pool.pages_of(sequence.owner))
            held = pages[: self.pool.blocks_for(sequence.handle.num_tokens)]
            self.events.append((sequence, Reserved(sequence.owner, held)))
        self.scheduler.new_pulls.clear()

    def _note_start(self, sequences: list[Sequence]) -> None:
        started_at = self.service_now()
        for sequence in sequences:
            if sequence.prefill_started_at is None:
                sequence.prefill_started_at = started_at
            if sequence.output_ids and sequence.decode_started_at is None:
                sequence.decode_started_at = started_at

    def _advance(self, step: Step, computed: Computed) -> None:
        values = computed.logprobs
        now = self.service_now()
        token_ids = computed.tokens.tolist()
        num_running = len(computed.sequences) - len(step.chunks)
        self._num_tokens += num_running
        for row, sequence in enumerate(computed.sequences[:num_running]):
            if sequence.state is State.DONE:  # aborted while the step was open
                continue
            sequence.num_computed += 1
            self._accept(sequence, token_ids[row], now, values.get(row))
        for row, chunk in enumerate(step.chunks, start=num_running):
            sequence = chunk.sequence
            if sequence.state is State.DONE:
                continue
            is_last = chunk.is_last
            sequence.num_computed += chunk.num_tokens
            self._num_tokens += chunk.num_tokens
            if is_last and self._accept(sequence, token_ids[row], now, values.get(row)):
                self._prompt_computed(sequence, computed)

    def _prompt_computed(self, sequence: Sequence, computed: Computed) -> None:
        if self.role is not Role.PREFILL:
            self.scheduler.start_decoding(sequence)
            return
        request_id = sequence.request.request_id
        handle = self.holding.hold(
            request_id,
            sequence.address,
            sequence.num_computed,
            sequence.owner,
            self.pool.pages_of(sequence.owner),
            computed.digests[sequence.owner],
            self.clock(),
        )
        self.scheduler.hand_over(sequence)
        del self._sequences[request_id]
        self._num_finished += 1
        self.events.append((sequence, prefilled(sequence, handle)))

    def _accept(
        self, sequence: Sequence, token_id: int, now: float, value: TokenLogprob | None
    ) -> bool:
        """Take the next token; True when the sequence goes on after it."""
        if token_id == INVALID:
            self._end(sequence, EngineStepFailed("the model's logits are not finite"))
            return False
        sequence.output_ids.append(token_id)
        if value is not None:
            sequence.logprobs.append(value)
        if sequence.first_token_at is None:
            sequence.first_token_at = now
            started_at = sequence.prefill_started_at
            sequence.prefill_queue_s = max(started_at - sequence.request.submitted_at, 0.0)
            sequence.prefill_s = now - started_at
        text = sequence.detokenizer.push(token_id) if sequence.detokenizer else ""
        reason = self._finish_reason(sequence, token_id)
        if reason is not None and sequence.detokenizer:
            text += sequence.detokenizer.flush()
        if sequence.streams:
            index = len(sequence.output_ids) - 1
            request_id = sequence.request.request_id
            entries = None if value is None else (value,)
            delta = TokenDelta(request_id, index, (token_id,), text, reason, entries)
            self.events.append((sequence, delta))
        if reason is not None:
            self._finish(sequence, reason, now)
        return reason is None

    def _finish_reason(self, sequence: Sequence, token_id: int) -> FinishReason | None:
        params = sequence.request.params
        if token_id in self.runner.shape.eos_token_ids and not params.ignore_eos:
            return FinishReason.STOP
        if sequence.detokenizer is not None and sequence.detokenizer.stopped:
            return FinishReason.STOP
        if len(sequence.output_ids) >= params.max_tokens:
            return FinishReason.LENGTH
        return None

    def _finish(self, sequence: Sequence, reason: FinishReason, now: float) -> None:
        detokenizer = sequence.detokenizer
        text = detokenizer.text if detokenizer else self.tokenizer.decode(sequence.output_ids)
        answer = completion(sequence, reason, text, now)
        is_prefill = self.role is Role.PREFILL
        self._end(sequence, prefilled(sequence, answer=answer) if is_prefill else answer)
        self._num_finished += 1

    def _end(self, sequence: Sequence, outcome: Completion | Prefilled | DaskserveError) -> None:
        self.scheduler.remove(sequence)
        sequence.state = State.DONE
        del self._sequences[sequence.request.request_id]
        self.events.append((sequence, outcome))

"""The engine's own schedulers, stepped one iteration at a time in virtual time.

A slow and plain second way to the simulator's answers: no closed forms, no compiled code, one
event per iteration, real page tables. Only step times, links and routing are written here.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque

import torch

from daskserve.core.instance import EngineConfig, Role
from daskserve.core.params import SamplingParams
from daskserve.core.request import Request
from daskserve.scheduling.routing import least_loaded, shortest_queue
from daskserve.workers.continuous import ContinuousScheduler
from daskserve.workers.forward import ModelShape
from daskserve.workers.kv_pool import KVPool
from daskserve.workers.prefill import PrefillScheduler
from daskserve.workers.sequence import Sequence

SHAPE = ModelShape(
    num_layers=1, num_kv_heads=1, head_dim=2, vocab_size=8, context_tokens=2**30,
    eos_token_ids=frozenset(),
)  # fmt: skip

PREFILL_DONE, TRANSFER_DONE, ARRIVAL, STEP_END, PREFILL_START = range(5)


class Prefill:
    def __init__(self, deployment, times):
        blocks = times.kv_capacity_tokens // deployment.block_size
        self.times = times
        self.pool = KVPool(SHAPE, torch.float32, blocks, deployment.block_size)
        self.scheduler = PrefillScheduler(
            self.pool, times.prefill_budget_tokens, times.max_batch_size
        )
        self.busy = False
        self.queued = []


class Decode:
    def __init__(self, deployment, times):
        blocks = times.kv_capacity_tokens // deployment.block_size
        role = Role.DECODE if deployment.mode == "disaggregated" else Role.COLOCATED
        config = EngineConfig(
            block_size=deployment.block_size, max_batch_size=times.max_batch_size,
            chunk_tokens=deployment.chunk_tokens,
        )  # fmt: skip
        self.times = times
        self.pool = KVPool(SHAPE, torch.float32, blocks, deployment.block_size)
        self.scheduler = ContinuousScheduler(self.pool, role, config, times.prefill_budget_tokens)
        self.step = None
        self.busy = False
        self.landed = []
        self.bound = []


class VirtualCluster:
    """Runs requests ``(arrival_s, prompt_tokens, output_tokens)``; ``done`` maps id to times."""

    decode_type = Decode

    def __init__(self, deployment):
        self.deployment = deployment
        self.prefills = [Prefill(deployment, times) for times in deployment.prefill_instances]
        self.decodes = [
            self.decode_type(deployment, times) for times in deployment.decode_instances
        ]
        self.ready = deque()
        self.pulls = []
        self.pulls_version = 0
        self.events = []
        self.sequence = itertools.count()
        self.done = {}
        self.times_of = {}
        self.endings = {}

    def run(self, requests):
        for request_id, (arrival_s, prompt, output) in enumerate(requests):
            self._at(arrival_s, ARRIVAL, self._arrive, request_id, prompt, output)
        while self.events:
            self.now, _, _, act, arguments = heapq.heappop(self.events)
            act(*arguments)
        return self.done

    def _at(self, time_s, priority, act, *arguments):
        heapq.heappush(self.events, (time_s, priority, next(self.sequence), act, arguments))

    def _arrive(self, request_id, prompt, output):
        params = SamplingParams(max_tokens=output, ignore_eos=True)
        sequence = Sequence(Request(str(request_id), (0,) * prompt, params, self.now, 0))
        self.times_of[sequence] = {"arrival": self.now}
        if not self.prefills:
            self.ready.append(sequence)
            self._bind()
            return
        tokens = [sum(q.request.num_prompt_tokens for q in p.queued) for p in self.prefills]
        chosen = shortest_queue(tokens, [len(p.queued) for p in self.prefills])
        prefill = self.prefills[chosen]
        self.times_of[sequence]["home"] = prefill
        prefill.queued.append(sequence)
        prefill.scheduler.add(sequence)
        self._at(self.now, PREFILL_START, self._start_prefill, prefill)

    def _start_prefill(self, prefill):
        step = None if prefill.busy else prefill.scheduler.next_step()
        if step is None:
            return
        self._computes(prefill, True)
        sizes = [chunk.num_tokens for chunk in step.chunks]
        for chunk in step.chunks:
            self.times_of[chunk.sequence]["prefill"] = self.now
        squares = sum(size**2 for size in sizes)
        seconds = prefill.times.prefill_s(sum(sizes), squares, len(sizes))
        seconds = prefill.times.latency_s(seconds) * self._pace(prefill)
        self._end_in(seconds, PREFILL_DONE, self._end_prefill, prefill, step)

    def _end_prefill(self, prefill, step):
        self._computes(prefill, False)
        for chunk in step.chunks:
            sequence = chunk.sequence
            prefill.queued.remove(sequence)
            self._token(sequence)
            if self._is_over(sequence):
                prefill.scheduler.remove(sequence)
                self._end(sequence)
            else:
                self.times_of[sequence]["pages"] = sequence.owner
                prefill.scheduler.hand_over(sequence)
                sequence.handle = prefill
                self.ready.append(sequence)
        self._bind()
        self._at(self.now, PREFILL_START, self._start_prefill, prefill)

    def _bind(self):
        while self.ready:
            need = self._pages(self.ready[0])
            used, total, active, most = zip(*map(self._observed, self.decodes), strict=True)
            chosen = least_loaded(used, total, active, most, need)
            if chosen < 0:
                return
            decode = self.decodes[chosen]
            decode.bound.append(self.ready[0])
            decode.scheduler.add(self.ready.popleft())
            if decode.step is None:
                self._at(self.now, STEP_END, self._iterate, decode, None)
            elif self.prefills:  # as ``Engine.add_early``
                decode.scheduler.admit_decodes()
                self._start_pulls(decode)

    def _start_pulls(self, decode):
        for sequence in decode.scheduler.new_pulls:
            self._start_pull(sequence, decode)
        decode.scheduler.new_pulls.clear()

    def _pages(self, sequence):
        """What the router keeps for a request: room for its limit if there is one."""
        limit = self.deployment.max_tokens
        prompt = sequence.request.num_prompt_tokens
        tokens = prompt + limit - 1 if limit else sequence.num_tokens
        return self.decodes[0].pool.blocks_for(tokens)

    def _observed(self, decode):
        scheduler = decode.scheduler
        waiting = scheduler.waiting.lengths(len(scheduler.waiting))
        promised = sum(decode.pool.blocks_for(length) for length in waiting)
        used = decode.pool.num_used + promised + scheduler.num_running
        if self.deployment.max_tokens:
            used = sum(map(self._pages, decode.bound))
        active = scheduler.num_active + len(waiting)
        return used, decode.pool.num_blocks, active, decode.times.max_batch_size

    def _iterate(self, decode, ended):
        if decode.step is not ended:
            return  # woken for what the end of another step at this time has dealt with
        if ended is not None:
            decode.step = None
            if self._collect(decode, ended):
                self._bind()
        for sequence, transfer_s in decode.landed:
            decode.scheduler.pull_ended(sequence.owner, True, transfer_s)
        decode.landed.clear()
        step = decode.scheduler.next_step()
        self._start_pulls(decode)
        decode.step = step
        if step is not None:
            self._note_starts(step)
            seconds = decode.times.latency_s(self._seconds(decode, step)) * self._pace(decode)
            self._end_in(seconds, STEP_END, self._iterate, decode, step)
        self._computes(decode, step is not None)

    # What steps take that others compute beside. An end that has been moved is not there any more.

    def _end_in(self, seconds, priority, act, instance, step):
        self.endings[instance] = (self.now + seconds, priority, act, step)
        self._at(self.now + seconds, priority, self._ended, instance, self.endings[instance])

    def _ended(self, instance, ending):
        if self.endings.get(instance) is ending:
            del self.endings[instance]
            ending[2](instance, ending[3])

    def _pace(self, instance):
        others, share = self.decodes, self.deployment.prefill_slowdown
        if isinstance(instance, Decode):
            others, share = self.prefills, self.deployment.decode_slowdown
        return 1 + share * sum(other.busy for other in others)

    def _computes(self, instance, is_busy):
        others = self.decodes if isinstance(instance, Prefill) else self.prefills
        before = [self._pace(other) for other in others]
        instance.busy = is_busy
        for other, pace in zip(others, before, strict=True):
            ratio = self._pace(other) / pace
            if other in self.endings and ratio != 1:
                ends_at, priority, act, step = self.endings[other]
                self._end_in((ends_at - self.now) * ratio, priority, act, other, step)

    def _seconds(self, decode, step):
        running = step.decode.sequences if step.decode else []
        context = sum(sequence.num_tokens for sequence in running)
        tokens = sum(chunk.num_tokens for chunk in step.chunks)
        starts = [chunk.sequence.num_computed for chunk in step.chunks]
        ends = [start + chunk.num_tokens for start, chunk in zip(starts, step.chunks, strict=True)]
        squares = sum(e**2 - s**2 for s, e in zip(starts, ends, strict=True))
        times = decode.times
        linear = times.decode_s(len(running), 0)
        if tokens:
            linear = max(linear, times.prefill_s(tokens + len(running), 0.0, 0.0))
        attention = times.decode_per_context_s[len(running)] * context
        prompts = times.prefill_per_prompt_s * len(step.chunks)
        return linear + attention + times.prefill_quadratic_s * squares + prompts

    def _note_starts(self, step):
        for sequence in step.sequences:
            self.times_of[sequence].setdefault("prefill", self.now)
            if sequence.output_ids:
                self.times_of[sequence].setdefault("decode", self.now)

    def _collect(self, decode, step):
        num_ended = 0
        running = list(step.decode.sequences) if step.decode else []
        if step.decode:
            step.decode.advance([0] * len(running))
        decode.scheduler.ended(step)
        for sequence in running:
            sequence.num_computed += 1
            num_ended += self._next_token(decode, sequence)
        for chunk in step.chunks:
            sequence, is_last = chunk.sequence, chunk.is_last
            sequence.num_computed += chunk.num_tokens
            if is_last:
                over = self._next_token(decode, sequence)
                num_ended += over
                if not over:
                    decode.scheduler.start_decoding(sequence)
        return num_ended

    def _next_token(self, decode, sequence):
        self._token(sequence)
        if self._is_over(sequence):
            decode.scheduler.remove(sequence)
            decode.bound.remove(sequence)
            self._end(sequence)
            return True
        return False

    def _token(self, sequence):
        sequence.output_ids.append(0)
        self.times_of[sequence].setdefault("first", self.now)

    def _is_over(self, sequence):
        return len(sequence.output_ids) == sequence.request.params.max_tokens

    def _end(self, sequence):
        times = self.times_of[sequence]
        self.done[int(sequence.request.request_id)] = {
            "first": times["first"], "prefill": times["prefill"], "end": self.now,
            "decode": times.get("decode"), "transfer": sequence.kv_transfer_s,
            "recomputes": sequence.num_recomputes,
        }  # fmt: skip

    def _start_pull(self, sequence, decode):
        deployment = self.deployment
        pages = decode.pool.blocks_for(sequence.request.num_prompt_tokens)
        num_bytes = pages * deployment.block_size * deployment.kv_bytes_per_token
        self._progress()
        self.pulls.append([sequence, decode, num_bytes, self.now])
        self._share()

    def _progress(self):
        for pull in self.pulls:
            if self.now > self.progressed_at:
                pull[2] -= self._rate(pull) * (self.now - self.progressed_at)
        self.progressed_at = self.now

    progressed_at = 0.0

    def _rate(self, pull):
        mine = self.deployment.link_bandwidth
        theirs = self.deployment.decode_link_bandwidth or mine
        same_home = sum(other[0].handle is pull[0].handle for other in self.pulls)
        same_decode = sum(other[1] is pull[1] for other in self.pulls)
        return min(mine / same_home, theirs / same_decode)

    def _share(self):
        self.pulls_version += 1
        if self.pulls:
            left = [
                0.0 if math.isinf(self._rate(pull)) else max(pull[2], 0.0) / self._rate(pull)
                for pull in self.pulls
            ]
            first = min(range(len(left)), key=left.__getitem__)
            self._at(self.now + left[first], TRANSFER_DONE, self._end_pull,
                     self.pulls_version, first)  # fmt: skip

    def _end_pull(self, version, index):
        if version != self.pulls_version:
            return
        self._progress()
        sequence, decode, _, started_at = self.pulls.pop(index)
        self._share()
        latency_s = self.deployment.link_latency_s
        self._at(self.now + latency_s, TRANSFER_DONE, self._land, sequence, decode, started_at)

    def _land(self, sequence, decode, started_at):
        home = sequence.handle
        home.pool.free(self.times_of[sequence]["pages"])
        self._at(self.now, PREFILL_START, self._start_prefill, home)
        decode.landed.append((sequence, self.now - started_at))
        if decode.step is None:
            self._at(self.now, STEP_END, self._iterate, decode, None)

"""The compiled loop against a plain one that visits every request in every step."""

import heapq
from collections import deque
from itertools import count

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from daskserve.planner.distserve import Colocated, Disaggregated, model_profile
from daskserve.planner.distserve.configuration import phase_coefficients
from daskserve.planner.distserve.simulation import simulate_arrays

PROFILE = model_profile("facebook/opt-13b")


class PlainStage:
    def __init__(self, first, last):
        self.first, self.last = first, last
        self.prefill, self.decode = deque(), deque()
        self.step, self.kind, self.awake = [], None, False
        self.following = None


class PlainSimulation:
    """A heap of (time, insertion order, what); queues of request indices; no shortcuts."""

    def __init__(self, configuration, arrival_ms, prompts, outputs, num_prefill, num_decode):
        self.prefill_row, self.decode_row = phase_coefficients(PROFILE, configuration)
        self.prefill_pp, self.decode_pp = configuration.prefill[1], configuration.decode[1]
        self.room = PROFILE.kv_capacity_tokens[configuration.prefill]
        self.prompts, self.outputs = prompts, outputs
        self.done = [0] * len(prompts)
        self.batch = [None] * len(prompts)
        self.first_ms, self.last_ms = [None] * len(prompts), [None] * len(prompts)
        self.order, self.events, self.now = count(), [], 0.0
        self.entrances = [self.pipeline(self.prefill_pp) for _ in range(num_prefill)]
        self.exits = []
        if isinstance(configuration, Disaggregated):
            self.exits = [self.pipeline(self.decode_pp) for _ in range(num_decode)]
        for index, time in enumerate(arrival_ms):
            self.push(time, index)

    def pipeline(self, length):
        stages = [PlainStage(rank == 0, rank == length - 1) for rank in range(length)]
        for rank, stage in enumerate(stages):
            stage.following = stages[(rank + 1) % length]
        return stages[0]

    def push(self, time, what):
        heapq.heappush(self.events, (time, next(self.order), what))

    def run(self):
        while self.events:
            self.now, _, what = heapq.heappop(self.events)
            if isinstance(what, int):
                stage = min(self.entrances, key=self.prefill_load)
                self.hand(stage, stage.prefill, [what])
            else:
                self.finish(what)
                self.start(what)
        return self.first_ms, self.last_ms

    def prefill_load(self, stage):
        return len(stage.prefill) + (len(stage.step) if stage.kind == "prefill" else 0)

    def hand(self, stage, queue, indices):
        queue.extend(indices)
        if indices and not stage.awake:
            stage.awake = True
            self.push(self.now, stage)

    def start(self, stage):
        stage.awake = bool(stage.prefill or stage.decode)
        if not stage.awake:
            return
        stage.kind = "prefill" if stage.prefill else "decode"
        take = self.take_prefill if stage.prefill else self.take_decode
        duration = take(stage)
        if stage.first:
            held = sum(self.prompts[index] + self.done[index] for index in stage.step)
            duration += 2 + held * 0.0001
        self.push(self.now + duration, stage)

    def take_prefill(self, stage):
        token, total = object(), 0
        while stage.prefill:
            index = stage.prefill[0]
            if stage.first:
                if total + self.prompts[index] > self.room:
                    break
                self.batch[index] = token
            elif stage.step and self.batch[index] is not self.batch[stage.step[0]]:
                break
            total += self.prompts[index]
            stage.step.append(stage.prefill.popleft())
        squares = sum(self.prompts[index] ** 2 for index in stage.step)
        a, b, c = self.prefill_row.prefill
        return (a + b * total + c * squares) * (1 / self.prefill_pp) + self.prefill_pp

    def take_decode(self, stage):
        total = 0
        while stage.decode:
            index = stage.decode[0]
            total += self.prompts[index] + self.done[index] + 1
            if total > 50_000:
                total -= self.prompts[index] + self.done[index] + 1
                break
            stage.step.append(stage.decode.popleft())
        row, size = self.decode_row, len(stage.step)
        a, b, c = row.decode_small if size < row.large_batch_from else row.decode_large
        return (a + b * total + c * size) * (1 / self.decode_pp)

    def finish(self, stage):
        step, stage.step = stage.step, []
        kind, stage.kind = stage.kind, None
        if not stage.last:
            queue = "prefill" if kind == "prefill" else "decode"
            self.hand(stage.following, getattr(stage.following, queue), step)
        elif kind == "prefill":
            for index in step:
                self.first_ms[index] = self.now
                fewest = min(self.exits, key=lambda head: len(head.decode), default=stage.following)
                self.hand(fewest, fewest.decode, [index])
        elif kind == "decode":
            for index in step:
                self.done[index] += 1
                if self.done[index] == self.outputs[index]:
                    self.last_ms[index] = self.now
            step = [index for index in step if self.last_ms[index] is None]
            self.hand(stage.following, stage.following.decode, step)


def both(configuration, arrival_ms, prompts, outputs, num_prefill, num_decode):
    """(TTFT, decode time) lists in seconds of the compiled and of the plain loop."""
    arrival_ms, prompts, outputs = (np.array(row) for row in (arrival_ms, prompts, outputs))
    latencies = simulate_arrays(
        PROFILE, configuration, arrival_ms, prompts, outputs, num_prefill, num_decode
    )
    rows = (row.tolist() for row in (arrival_ms, prompts, outputs))
    first_ms, last_ms = PlainSimulation(configuration, *rows, num_prefill, num_decode).run()
    ttft_s = (np.array(first_ms) - arrival_ms) / 1000
    decode_s = (np.array(last_ms) - np.array(first_ms)) / 1000
    compiled = (latencies.ttft_s.tolist(), latencies.decode_s.tolist())
    return compiled, (ttft_s.tolist(), decode_s.tolist())


# Few distinct values, so that events fall together, and prompts that overflow a decode step.
REQUESTS = st.lists(
    st.tuples(
        st.sampled_from([0.0, 0.0, 7.0, 40.0, 90.0]),
        st.sampled_from([1, 500, 500, 9_000, 25_000]),
        st.sampled_from([1, 2, 3, 17, 40]),
    ),
    min_size=4,
    max_size=16,
)
DEGREES = st.tuples(st.sampled_from([1, 2]), st.sampled_from([1, 2, 4]))


@given(
    requests=REQUESTS,
    prefill=DEGREES,
    decode=st.none() | DEGREES,
    counts=st.tuples(st.integers(1, 3), st.integers(1, 3)),
)
@settings(max_examples=150)
def test_every_time_equals_the_plain_loop(requests, prefill, decode, counts):
    if decode is None:
        configuration, counts = Colocated(*prefill), (counts[0], 1)
    else:
        configuration = Disaggregated(1, *prefill, *decode)
    gaps, prompts, outputs = zip(*requests, strict=True)
    compiled, plain = both(configuration, np.cumsum(gaps), prompts, outputs, *counts)
    assert compiled == plain


def test_of_two_prefills_that_end_together_the_one_started_first_is_dispatched_first():
    configuration = Disaggregated(1, 1, 1, 1, 1)

    def prefill_ms(tokens):
        return both(configuration, [0.0], [tokens], [1], 1, 1)[1][0][0] * 1000

    # The first decode instance is busy with request 0; request 1 occupies the second prefill
    # instance, request 2 the first one later, and both end at the same instant.
    end_ms, short_ms = prefill_ms(9_000), prefill_ms(500)
    start_ms = end_ms - short_ms
    assert start_ms + short_ms == end_ms
    arrival_ms = [0.0, 0.0, start_ms]
    compiled, plain = both(configuration, arrival_ms, [100, 9_000, 500], [200, 5, 5], 2, 2)
    assert compiled == plain
    waited_for_a_step, alone = compiled[1][1:]
    assert waited_for_a_step > alone

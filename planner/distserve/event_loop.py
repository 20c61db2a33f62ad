"""The compiled event loop: same events, same order at equal times, same rounding.

The original is a process-based simulation whose pending events form a heap of (time, insertion
order). Two facts make it small. A stage has at most one event that anybody waits for: the end of
its step, or its wake-up. And arrivals were all inserted before any other event, so that at equal
times they come first. All compiled code is in this one file because the on-disk cache watches
only the file of the outermost function.

Times are milliseconds here, and are added up in the original's order, so that even the last bits
agree.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

ASLEEP, PREFILL, DECODE = 0, 1, 2
"""What a stage is doing."""
MANY_ROUNDS = 2**62

DECODE_STEP_TOKENS = 50_000
"""Most contexts (plus one token each) in one decode step, a constant of the original."""
PREFILL_PAUSE_TOKENS = 9_000_000
"""A stage starts no prefill while more context than this waits there for decode."""
SUBMIT_MS = 2.0
SUBMIT_MS_PER_TOKEN = 0.0001
"""What the first stage of a pipeline adds to a step for handing it out."""


REQUEST = np.dtype(
    [
        ("arrival_ms", np.float64),
        ("first_token_ms", np.float64),
        ("finished_ms", np.float64),
        ("prompt_tokens", np.int64),
        ("output_tokens", np.int64),
        ("num_decoded", np.int64),  # less the rounds not yet booked on its list
        ("next_request", np.int64),  # on the same list; a request is on at most one
        ("prefill_batch", np.int64),
    ]
)
CHAIN = np.dtype(
    [
        ("head", np.int64),
        ("tail", np.int64),
        ("size", np.int64),
        ("context_tokens", np.int64),
        ("rounds", np.int64),  # decode rounds that all its requests did, not yet booked on them
        ("rounds_left", np.int64),  # nobody finishes before that many more
    ]
)
"""Requests in a queue or in a step, as a linked list."""

STAGE = np.dtype(
    [
        ("event_ms", np.float64),  # infinite while it sleeps
        ("event_order", np.int64),
        ("running", np.int64),
        ("next_stage", np.int64),
        ("is_first", np.int64),
        ("is_last", np.int64),
        ("to_prefill", CHAIN),
        ("to_decode", CHAIN),
        ("step", CHAIN),
    ]
)


class Costs(NamedTuple):
    """Step-time coefficients in milliseconds, and limits of one step."""

    prefill: tuple[float, float, float]
    decode_small: tuple[float, float, float]
    decode_large: tuple[float, float, float]
    large_batch_from: int
    prefill_share: float
    decode_share: float
    prefill_stage_ms: float
    prefill_step_tokens: int
    decode_step_requests: int


@njit(cache=True, nogil=True)
def run(requests, stages, costs, prefill_heads, decode_heads):
    """Runs every request to its end; fills ``first_token_ms`` and ``finished_ms``.

    ``decode_heads`` is empty when decode stays where prefill was (colocated).
    """
    order = 0
    arrived = 0
    while True:
        stage = stages[_next_event(stages)]
        now = stage.event_ms
        if arrived < len(requests) and requests[arrived].arrival_ms <= now:
            now = requests[arrived].arrival_ms
            head = _least_prefill(stages, prefill_heads)
            _append(requests, head.to_prefill, arrived)
            order = _wake(head, now, order)
            arrived += 1
            continue
        if now == np.inf:
            return
        following = stages[stage.next_stage]
        if stage.running == PREFILL:
            if stage.is_last and len(decode_heads) > 0:
                order = _dispatch(requests, stages, stage, decode_heads, now, order)
            else:
                order = _finish_prefill(requests, stage, following, now, order)
        elif stage.running == DECODE:
            order = _finish_decode(requests, stage, following, now, order)
        order = _start(requests, stage, costs, now, order)


@njit(cache=True, nogil=True)
def _next_event(stages):
    """Index of the stage with the earliest event; at equal times of the one inserted first."""
    best = 0
    for index in range(1, len(stages)):
        event_ms = stages[index].event_ms
        if event_ms < stages[best].event_ms or (
            event_ms == stages[best].event_ms
            and stages[index].event_order < stages[best].event_order
        ):
            best = index
    return best


@njit(cache=True, nogil=True)
def _wake(stage, now, order):
    """Wakes a stage that sleeps; the first of several calls counts. Returns the next order."""
    if stage.running == ASLEEP and stage.event_ms == np.inf:
        stage.event_ms = now
        stage.event_order = order
        return order + 1
    return order


@njit(cache=True, nogil=True)
def _least_prefill(stages, heads):
    """First of the instances with the fewest requests that wait for prefill or are in it."""
    best = stages[heads[0]]
    fewest = -1
    for index in heads:
        head = stages[index]
        load = head.to_prefill.size
        if head.running == PREFILL:
            load += head.step.size
        if fewest < 0 or load < fewest:
            best, fewest = head, load
    return best


@njit(cache=True, nogil=True)
def _least_decode(stages, heads):
    """First of the instances with the fewest requests that wait for their next decode step."""
    best = stages[heads[0]]
    for index in heads[1:]:
        if stages[index].to_decode.size < best.to_decode.size:
            best = stages[index]
    return best


@njit(cache=True, nogil=True)
def _append(requests, chain, index):
    request = requests[index]
    rounds_left = request.output_tokens - request.num_decoded
    if chain.size == 0:
        chain.head = index
        chain.rounds = 0
        chain.rounds_left = rounds_left
    else:
        requests[chain.tail].next_request = index
        chain.rounds_left = min(chain.rounds_left, rounds_left)
    chain.tail = index
    chain.size += 1
    chain.context_tokens += request.prompt_tokens + request.num_decoded
    request.num_decoded -= chain.rounds


@njit(cache=True, nogil=True)
def _pop(requests, chain):
    index = chain.head
    request = requests[index]
    request.num_decoded += chain.rounds
    chain.head = request.next_request
    chain.size -= 1
    chain.context_tokens -= request.prompt_tokens + request.num_decoded
    return index


@njit(cache=True, nogil=True)
def _move_all(requests, source, target):
    """Appends one whole chain to another and empties it, visiting the shorter at most."""
    if target.size == 0:
        target.head = source.head
        target.rounds = source.rounds
        target.rounds_left = source.rounds_left
    else:
        if source.size < target.size:
            _rebase(requests, source, target.rounds)
        else:
            _rebase(requests, target, source.rounds)
        requests[target.tail].next_request = source.head
        target.rounds_left = min(target.rounds_left, source.rounds_left)
    target.tail = source.tail
    target.size += source.size
    target.context_tokens += source.context_tokens
    source.size = 0
    source.context_tokens = 0


@njit(cache=True, nogil=True)
def _rebase(requests, chain, rounds):
    """Books on the requests of a chain so much that ``rounds`` are left unbooked."""
    difference = chain.rounds - rounds
    chain.rounds = rounds
    if difference != 0:
        index = chain.head
        for _ in range(chain.size):
            requests[index].num_decoded += difference
            index = requests[index].next_request


@njit(cache=True, nogil=True)
def _start(requests, stage, costs, now, order):
    """Starts the next step of a stage, prefill first, or lets it sleep."""
    can_prefill = stage.to_decode.context_tokens <= PREFILL_PAUSE_TOKENS
    if stage.to_prefill.size > 0 and can_prefill:
        stage.running = PREFILL
        duration = _start_prefill(requests, stage, costs, order)
    elif stage.to_decode.size > 0:
        stage.running = DECODE
        duration = _start_decode(requests, stage, costs)
    else:
        stage.running = ASLEEP
        stage.event_ms = np.inf
        return order
    if stage.is_first:
        duration += SUBMIT_MS + stage.step.context_tokens * SUBMIT_MS_PER_TOKEN
    stage.event_ms = now + duration
    stage.event_order = order
    return order + 1


@njit(cache=True, nogil=True)
def _start_prefill(requests, stage, costs, batch_id):
    """Fills a step at the first stage, keeps it together at later ones. Returns its duration."""
    waiting, step = stage.to_prefill, stage.step
    first_batch = requests[waiting.head].prefill_batch
    sum_of_squares = 0
    for _ in range(waiting.size):
        request = requests[waiting.head]
        length = request.prompt_tokens
        if stage.is_first:
            if step.context_tokens + length > costs.prefill_step_tokens:
                break
            request.prefill_batch = batch_id
        elif request.prefill_batch != first_batch:
            break
        _append(requests, step, _pop(requests, waiting))
        sum_of_squares += length * length
    a, b, c = costs.prefill
    whole_pass = a + b * step.context_tokens + c * sum_of_squares
    return whole_pass * costs.prefill_share + costs.prefill_stage_ms


@njit(cache=True, nogil=True)
def _start_decode(requests, stage, costs):
    """Takes from the head of the queue what one step may hold. Returns its duration."""
    waiting, step = stage.to_decode, stage.step
    fits = waiting.context_tokens + waiting.size <= DECODE_STEP_TOKENS
    if fits and waiting.size <= costs.decode_step_requests:
        _move_all(requests, waiting, step)
    else:
        room = DECODE_STEP_TOKENS
        for _ in range(min(waiting.size, costs.decode_step_requests)):
            request = requests[waiting.head]
            room -= request.prompt_tokens + request.num_decoded + waiting.rounds + 1
            if room < 0:
                break
            _append(requests, step, _pop(requests, waiting))
    num_tokens = step.context_tokens + step.size
    a, b, c = costs.decode_large
    if step.size < costs.large_batch_from:
        a, b, c = costs.decode_small
    return (a + b * num_tokens + c * step.size) * costs.decode_share


@njit(cache=True, nogil=True)
def _dispatch(requests, stages, stage, decode_heads, now, order):
    """Sends what the last prefill stage finished to decode instances, one by one."""
    for _ in range(stage.step.size):
        index = _pop(requests, stage.step)
        requests[index].first_token_ms = now
        head = _least_decode(stages, decode_heads)
        _append(requests, head.to_decode, index)
        order = _wake(head, now, order)
    return order


@njit(cache=True, nogil=True)
def _finish_prefill(requests, stage, following, now, order):
    """Hands a prefill step to the next stage, or after the last one to decode in place."""
    if not stage.is_last:
        _move_all(requests, stage.step, following.to_prefill)
        return _wake(following, now, order)
    index = stage.step.head
    for _ in range(stage.step.size):
        requests[index].first_token_ms = now
        index = requests[index].next_request
    _move_all(requests, stage.step, following.to_decode)
    return _wake(following, now, order)


@njit(cache=True, nogil=True)
def _finish_decode(requests, stage, following, now, order):
    """Hands a decode step on; after the last stage every request has one more token."""
    step = stage.step
    if stage.is_last:
        step.rounds += 1
        step.rounds_left -= 1
        step.context_tokens += step.size
        if step.rounds_left == 0:
            _retire(requests, step, now)
            if step.size == 0:
                return order
    _move_all(requests, step, following.to_decode)
    return _wake(following, now, order)


@njit(cache=True, nogil=True)
def _retire(requests, step, now):
    """Takes out of a step the requests that have all their tokens, keeps the others' order."""
    _rebase(requests, step, 0)
    step.rounds_left = MANY_ROUNDS
    for _ in range(step.size):
        index = _pop(requests, step)
        if requests[index].num_decoded < requests[index].output_tokens:
            _append(requests, step, index)
        else:
            requests[index].finished_ms = now

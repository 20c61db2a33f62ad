"""A prefill instance: token-budget batches through the pipeline, finished KV kept until pulled."""

from __future__ import annotations

from daskserve.planner.simulator.compiled.access import (
    flight_at,
    prefill_at,
    queue_at,
    router_row,
    scratch_row,
    slot_at,
    stage_at,
    times_at,
)
from daskserve.planner.simulator.compiled.agenda import FIRST_PREFILL, schedule
from daskserve.planner.simulator.compiled.compiling import inner
from daskserve.planner.simulator.compiled.ending import finish
from daskserve.planner.simulator.compiled.lists import pop_front, prompt_lookahead, push
from daskserve.planner.simulator.compiled.passes import blocks, through_stages, tokens_s
from daskserve.planner.simulator.compiled.policies import prefill_batch_size, shortest_queue
from daskserve.planner.simulator.compiled.records import (
    INPUT,
    NOBODY,
    PREFILLING,
    QUEUED,
    QUEUED_REQUESTS,
    QUEUED_TOKENS,
    READY,
    READY_QUEUE,
)
from daskserve.planner.simulator.compiled.sharing import count_prefill


@inner
def queue_for_prefill(world, slot_id, now):
    """A request arrives: to the instance with the shortest queue, counting what it computes."""
    count = world.num_prefills
    queued_tokens = router_row(world, QUEUED_TOKENS)[:count]
    queued_requests = router_row(world, QUEUED_REQUESTS)[:count]
    prefill_id = shortest_queue(queued_tokens, queued_requests)
    slot = slot_at(world, slot_id)
    slot.prefill = prefill_id
    slot.state = QUEUED
    queued_tokens[prefill_id] += slot.prompt_tokens
    queued_requests[prefill_id] += 1
    push(world, prefill_at(world, prefill_id).queue, slot_id)
    if not prefill_at(world, prefill_id).is_full:
        _ask_to_start(world, prefill_id, now)


@inner
def free_prompt(world, slot, now):
    """The KV of a prompt leaves the prefill instance, which may have waited for the room."""
    prefill = prefill_at(world, slot.prefill)
    prefill.free_blocks += blocks(slot.prompt_tokens, world.block_size)
    prefill.is_full = False
    _ask_to_start(world, slot.prefill, now)


@inner
def start_batch(world, prefill_id, now):
    """Event: the first stage can take a batch. At most one batch per stage is in flight."""
    prefill = prefill_at(world, prefill_id)
    times = times_at(world, prefill.times)
    if queue_at(world, prefill.queue).count == 0 or prefill.num_flights >= times.num_stages:
        return
    num_lengths = prompt_lookahead(world, prefill.queue, times.max_batch, times.budget_tokens)
    count = prefill_batch_size(
        scratch_row(world, INPUT)[:num_lengths],
        times.budget_tokens,
        prefill.free_blocks,
        world.block_size,
        times.max_batch,
    )
    if count == 0:
        prefill.is_full = True
        return
    _launch(world, prefill_id, count, now)
    _ask_to_start(world, prefill_id, now)


@inner
def finish_batch(world, prefill_id, now):
    """Event: the oldest batch leaves the pipeline with the first tokens of its requests."""
    prefill = prefill_at(world, prefill_id)
    num_stages = times_at(world, prefill.times).num_stages
    slot_id = flight_at(world, prefill.first_flight + prefill.oldest).head
    prefill.oldest = (prefill.oldest + 1) % num_stages
    prefill.num_flights -= 1
    prefill.ended_s = now
    if prefill.num_flights == 0:
        count_prefill(world, -1, now)
    else:
        next_done_s = flight_at(world, prefill.first_flight + prefill.oldest).done_s
        schedule(world, FIRST_PREFILL + 2 * prefill_id, next_done_s)
    while slot_id != NOBODY:
        slot = slot_at(world, slot_id)
        following = slot.next
        slot.first_token_s = now
        slot.num_tokens += 1
        router_row(world, QUEUED_TOKENS)[prefill_id] -= slot.prompt_tokens
        router_row(world, QUEUED_REQUESTS)[prefill_id] -= 1
        if slot.output_tokens == 1 or world.num_instances == 0:
            free_prompt(world, slot, now)
            finish(world, slot_id, now)
        else:
            slot.state = READY
            push(world, READY_QUEUE, slot_id)
        slot_id = following
    _ask_to_start(world, prefill_id, now)


@inner
def _ask_to_start(world, prefill_id, now):
    prefill = prefill_at(world, prefill_id)
    num_stages = times_at(world, prefill.times).num_stages
    if queue_at(world, prefill.queue).count > 0 and prefill.num_flights < num_stages:
        free_s = stage_at(world, prefill.first_stage).free_s
        schedule(world, FIRST_PREFILL + 2 * prefill_id + 1, max(now, free_s))


@inner
def _launch(world, prefill_id, count, now):
    prefill = prefill_at(world, prefill_id)
    times = times_at(world, prefill.times)
    place = (prefill.oldest + prefill.num_flights) % times.num_stages
    flight = flight_at(world, prefill.first_flight + place)
    head = last = NOBODY
    num_tokens = 0
    squares = 0.0
    for _ in range(count):
        slot_id = pop_front(world, prefill.queue)
        slot = slot_at(world, slot_id)
        slot.state = PREFILLING
        slot.prefill_started_s = now
        slot.next = NOBODY
        if head == NOBODY:
            head = slot_id
        else:
            slot_at(world, last).next = slot_id
        last = slot_id
        prefill.free_blocks -= blocks(slot.num_tokens, world.block_size)
        num_tokens += slot.num_tokens
        squares += float(slot.num_tokens) ** 2
    used = prefill.total_blocks - prefill.free_blocks
    prefill.peak_blocks = max(prefill.peak_blocks, used)
    pass_s = tokens_s(world, times, num_tokens) + times.quadratic_s * squares
    pass_s += times.per_prompt_s * count
    if prefill.ended_s == now:
        pass_s += times.following_s
    pass_s *= world.prefill_pace
    flight.head = head
    flight.done_s = through_stages(world, prefill.first_stage, times, pass_s, now)
    prefill.num_flights += 1
    prefill.busy_s += pass_s + times.num_stages * times.stage_overhead_s
    if prefill.num_flights == 1:
        schedule(world, FIRST_PREFILL + 2 * prefill_id, flight.done_s)
        count_prefill(world, 1, now)

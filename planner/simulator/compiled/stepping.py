"""The step loop of a lane: what the last pass brought, and what the next one computes.

Mirrors the engine's loop decision by decision: grow, admit, then prompts in steps of their own
or in chunks that ride along with a decode step. A run of pure decode steps is one event.
"""

from __future__ import annotations

from daskserve.planner.simulator.compiled.access import (
    batch_at,
    instance_at,
    lane_at,
    queue_at,
    row_of,
    scratch_row,
    slot_at,
    stage_at,
    times_at,
)
from daskserve.planner.simulator.compiled.admission import (
    admit_prompts,
    admit_pulled,
    bind_ready,
    cut_short,
    wake_idle,
)
from daskserve.planner.simulator.compiled.agenda import schedule
from daskserve.planner.simulator.compiled.compiling import inlined, inner
from daskserve.planner.simulator.compiled.ending import finish
from daskserve.planner.simulator.compiled.lists import pop_front, push
from daskserve.planner.simulator.compiled.memory import (
    grow,
    lane_source,
    note_peak,
    stop_computing,
    wake_stalled,
)
from daskserve.planner.simulator.compiled.pages import growth, growth_at, iterations_within
from daskserve.planner.simulator.compiled.passes import (
    blocks,
    boundary_s,
    mixed_s,
    through_stages,
)
from daskserve.planner.simulator.compiled.policies import chunk_tokens, prefill_batch_size
from daskserve.planner.simulator.compiled.prefilling import free_prompt
from daskserve.planner.simulator.compiled.records import (
    BUSY,
    CHUNK_OF,
    CHUNK_TOKENS,
    CHUNKED,
    COMPUTES,
    ENDS_AT,
    IDLE,
    INPUT,
    JOINING,
    NOBODY,
    PULLED,
    STAGE_TAKEN,
    STALLED,
    STARTS,
)
from daskserve.planner.simulator.compiled.running import pop_ended, start_running
from daskserve.planner.simulator.compiled.sharing import count_lane


@inner
def land(world, slot_id, now):
    """Event: a pull is complete; its request joins with the lane's next step."""
    slot = slot_at(world, slot_id)
    slot.state = JOINING
    if slot.prefill != NOBODY:
        free_prompt(world, slot, now)
    lane = lane_at(world, slot.lane)
    push(world, lane.joining, slot_id)
    if lane.state == IDLE or lane.state == STALLED:
        schedule(world, lane_source(world, slot.lane), now)
    else:
        cut_short(world, slot.lane, now)


@inlined
def end_step(world, lane_id, now):
    """Event: the lane's pass, or its run of iterations, is over; or it was woken."""
    lane = lane_at(world, lane_id)
    instance = instance_at(world, lane.instance)
    if lane.state == BUSY:
        _collect(world, lane_id, now)
    free_s = stage_at(world, instance.first_stage).free_s
    if free_s > now:
        lane.state = STAGE_TAKEN
        schedule(world, lane_source(world, lane_id), free_s)
        return
    _start_step(world, lane_id, now)
    count_lane(world, lane_id, now)


@inner
def _collect(world, lane_id, now):
    lane = lane_at(world, lane_id)
    instance = instance_at(world, lane.instance)
    lane.state = IDLE
    num_ended = 0
    if lane.decodes:
        num_ended += _collect_tokens(world, lane_id, now)
    num_ended += _collect_chunks(world, lane_id, now)
    if num_ended > 0:
        wake_stalled(world, lane.instance, now)
        if instance.num_lanes > 1 and queue_at(world, instance.queue).count > 0:
            wake_idle(world, lane.instance, now)
        bind_ready(world, now)


@inner
def _collect_tokens(world, lane_id, now):
    lane = lane_at(world, lane_id)
    instance = instance_at(world, lane.instance)
    if lane.num_chunks == 0 and instance.num_lanes == 1:
        instance.busy_s += now - lane.began_s
    # The page before the step that follows the run is the next step's business.
    instance.free_blocks -= growth(world, lane_id, lane.planned - 1)
    note_peak(instance)
    lane.iteration += lane.planned
    lane.context_sum += lane.planned * lane.num_running
    lane.grown_iteration = NOBODY
    num_ended = 0
    while True:
        slot_id = pop_ended(world, lane_id)
        if slot_id == NOBODY:
            break
        _end(world, slot_id, now)
        num_ended += 1
    lane.num_short = growth_at(world, lane_id, lane.iteration)
    return num_ended


@inner
def _collect_chunks(world, lane_id, now):
    lane = lane_at(world, lane_id)
    num_ended = 0
    for index in range(lane.num_chunks):
        slot_id = row_of(world, lane_id, CHUNK_OF)[index]
        slot = slot_at(world, slot_id)
        slot.num_uncomputed -= row_of(world, lane_id, CHUNK_TOKENS)[index]
        if slot.num_uncomputed > 0:
            continue
        stop_computing(world, slot_id)
        slot.num_tokens += 1
        if slot.first_token_s < 0:
            slot.first_token_s = now
        if slot.num_tokens - slot.prompt_tokens == slot.output_tokens:
            _end(world, slot_id, now)
            num_ended += 1
        else:
            start_running(world, slot_id, False)
    lane.num_chunks = 0
    return num_ended


@inner
def _end(world, slot_id, now):
    slot = slot_at(world, slot_id)
    instance = instance_at(world, slot.instance)
    # The last token was never fed back, so it has no place in a page.
    instance.free_blocks += blocks(slot.num_tokens - 1, world.block_size)
    instance.booked_blocks -= slot.booked_blocks
    instance.num_active -= 1
    lane_at(world, slot.lane).num_members -= 1
    finish(world, slot_id, now)


@inlined
def _start_step(world, lane_id, now):
    lane = lane_at(world, lane_id)
    instance = instance_at(world, lane.instance)
    mode = world.mode
    lane.state = BUSY
    lane.planned = 0
    while queue_at(world, lane.joining).count > 0:
        start_running(world, pop_front(world, lane.joining), True)
    grown = grow(world, lane_id, now)
    can_decode = grown and lane.num_running > 0
    if mode == PULLED:
        admit_pulled(world, lane.instance, now)
    else:
        admit_prompts(world, lane_id, now)
    if mode == CHUNKED:
        _choose_chunks(world, lane_id)
    else:
        _choose_prompts(world, lane_id)
        can_decode = can_decode and lane.num_chunks == 0
    lane.decodes = can_decode
    if lane.num_chunks == 0 and not can_decode:
        lane.state = IDLE if grown else STALLED
        return
    _note_starts(world, lane_id, now)
    if lane.num_chunks == 0 and instance.num_lanes == 1:
        _run_iterations(world, lane_id, now)
    else:
        _run_pass(world, lane_id, now)


@inner
def _choose_prompts(world, lane_id):
    """Whole prompts, up to the token budget; their pages are reserved already."""
    lane = lane_at(world, lane_id)
    if lane.num_computing == 0:
        return
    instance = instance_at(world, lane.instance)
    times = times_at(world, instance.times)
    for place in range(lane.num_computing):
        slot = slot_at(world, row_of(world, lane_id, COMPUTES)[place])
        scratch_row(world, INPUT)[place] = slot.num_uncomputed
    lane.num_chunks = prefill_batch_size(
        scratch_row(world, INPUT)[: lane.num_computing],
        times.budget_tokens,
        instance.total_blocks,
        world.block_size,
        lane.num_computing,
    )
    for place in range(lane.num_chunks):
        row_of(world, lane_id, CHUNK_OF)[place] = row_of(world, lane_id, COMPUTES)[place]
        row_of(world, lane_id, CHUNK_TOKENS)[place] = scratch_row(world, INPUT)[place]


@inner
def _choose_chunks(world, lane_id):
    """Pieces of prompts that fill the step beside what decodes."""
    lane = lane_at(world, lane_id)
    step_tokens = lane.num_running
    budget = world.chunk_tokens
    for place in range(lane.num_computing):
        if place > 0 and step_tokens >= budget:
            break
        slot_id = row_of(world, lane_id, COMPUTES)[place]
        size = chunk_tokens(slot_at(world, slot_id).num_uncomputed, budget, step_tokens)
        row_of(world, lane_id, CHUNK_OF)[place] = slot_id
        row_of(world, lane_id, CHUNK_TOKENS)[place] = size
        lane.num_chunks += 1
        step_tokens += size


@inner
def _note_starts(world, lane_id, now):
    lane = lane_at(world, lane_id)
    for index in range(lane.num_chunks):
        slot = slot_at(world, row_of(world, lane_id, CHUNK_OF)[index])
        if slot.prefill_started_s < 0:
            slot.prefill_started_s = now
        if slot.num_tokens > slot.prompt_tokens and slot.decode_started_s < 0:
            slot.decode_started_s = now
    if lane.decodes:
        for index in range(lane.num_starts):
            slot_at(world, row_of(world, lane_id, STARTS)[index]).decode_started_s = now
        lane.num_starts = 0


@inner
def _run_iterations(world, lane_id, now):
    """Decode until the first request ends or pages run out, as one event."""
    lane = lane_at(world, lane_id)
    instance = instance_at(world, lane.instance)
    times = times_at(world, instance.times)
    batch = batch_at(world, times.first_batch + lane.num_running)
    lane.began_s = lane.started_s = now
    lane.pace = world.decode_pace
    lane.base_s = batch.base_s + times.stage_overhead_s
    lane.per_context_s = batch.per_context_s
    until_end = row_of(world, lane_id, ENDS_AT)[0] - lane.iteration
    lane.planned = iterations_within(world, lane_id, until_end, instance.free_blocks)
    schedule(world, lane_source(world, lane_id), boundary_s(lane, lane.planned))


@inner
def _run_pass(world, lane_id, now):
    """One pass through the pipeline: prompts, a decode step, or both."""
    lane = lane_at(world, lane_id)
    instance = instance_at(world, lane.instance)
    times = times_at(world, instance.times)
    num_tokens = 0
    squares = 0.0
    for index in range(lane.num_chunks):
        slot = slot_at(world, row_of(world, lane_id, CHUNK_OF)[index])
        size = row_of(world, lane_id, CHUNK_TOKENS)[index]
        begin = slot.num_tokens - slot.num_uncomputed
        num_tokens += size
        squares += float(begin + size) ** 2 - float(begin) ** 2
    num_decoding = lane.num_running if lane.decodes else 0
    context_sum = lane.context_sum if lane.decodes else 0
    pass_s = mixed_s(world, times, num_tokens, squares, num_decoding, context_sum)
    pass_s += times.per_prompt_s * lane.num_chunks
    pass_s *= world.decode_pace
    lane.planned = 1
    instance.busy_s += pass_s + times.num_stages * times.stage_overhead_s
    leaves_s = through_stages(world, instance.first_stage, times, pass_s, now)
    schedule(world, lane_source(world, lane_id), leaves_s)

"""Page by page growth of what runs, and preemption by recompute when the pool is full.

Mirrors the engine: every running request gets a page for its next token, the oldest first; when
there is none, the request admitted last gives up its pages and goes back to the head of the
queue, to be computed again from its tokens.
"""

from __future__ import annotations

from daskserve.planner.simulator.compiled.access import (
    instance_at,
    lane_at,
    row_of,
    scratch_row,
    slot_at,
)
from daskserve.planner.simulator.compiled.agenda import FIRST_PREFILL, schedule
from daskserve.planner.simulator.compiled.compiling import inner
from daskserve.planner.simulator.compiled.lists import push_front
from daskserve.planner.simulator.compiled.passes import blocks
from daskserve.planner.simulator.compiled.policies import NONE, preemption_victim
from daskserve.planner.simulator.compiled.records import (
    BUSY,
    CANDIDATES,
    COMPUTES,
    COMPUTING,
    INPUT,
    NOBODY,
    RUNNING,
    RUNS,
    SHORT,
    STALLED,
    WAITING,
)
from daskserve.planner.simulator.compiled.running import find, is_short, preempt_running


@inner
def lane_source(world, lane_id):
    """Who the lane is on the agenda."""
    return FIRST_PREFILL + 2 * world.num_prefills + lane_id


@inner
def note_peak(instance):
    used = instance.total_blocks - instance.free_blocks
    instance.peak_blocks = max(instance.peak_blocks, used)


@inner
def grow(world, lane_id, now):
    """Pages for the next token of all that runs; False if the step must wait for memory."""
    lane = lane_at(world, lane_id)
    instance = instance_at(world, lane.instance)
    if lane.num_short > instance.free_blocks:
        if not _grow_by_preempting(world, lane_id, now):
            return False
    else:
        instance.free_blocks -= lane.num_short
    lane.num_short = 0
    lane.growths += 1
    lane.grown_iteration = lane.iteration
    note_peak(instance)
    return True


@inner
def wake_stalled(world, instance_id, now):
    """Pages came free: steps that waited for memory try again."""
    instance = instance_at(world, instance_id)
    for lane_id in range(instance.first_lane, instance.first_lane + instance.num_lanes):
        if lane_at(world, lane_id).state == STALLED:
            schedule(world, lane_source(world, lane_id), now)


@inner
def _grow_by_preempting(world, lane_id, now):
    instance_id = lane_at(world, lane_id).instance
    instance = instance_at(world, instance_id)
    count = _short_by_admission(world, lane_id)
    preempted = False
    for index in range(count):
        slot_id = scratch_row(world, SHORT)[index]
        slot = slot_at(world, slot_id)
        while slot.state == RUNNING:
            if instance.free_blocks > 0:
                instance.free_blocks -= 1
                slot.cover_iteration = lane_at(world, lane_id).iteration
                lane_at(world, lane_id).num_short -= 1
                break
            num_candidates = _candidates(world, lane_id)
            victim = preemption_victim(scratch_row(world, INPUT)[:num_candidates])
            if victim == NONE:
                # Alone: pages come free when a pull or another lane's step ends.
                return False
            _preempt(world, scratch_row(world, CANDIDATES)[victim])
            preempted = True
    if preempted and instance.free_blocks > 0:
        wake_stalled(world, instance_id, now)
    return True


@inner
def _short_by_admission(world, lane_id):
    """Slots without a page for their next token, oldest first, in row SHORT of scratch."""
    count = 0
    for place in range(lane_at(world, lane_id).num_running):
        slot_id = row_of(world, lane_id, RUNS)[place]
        slot = slot_at(world, slot_id)
        if not is_short(world, slot):
            continue
        index = count
        while index > 0:
            other = scratch_row(world, SHORT)[index - 1]
            if slot_at(world, other).admission < slot.admission:
                break
            scratch_row(world, SHORT)[index] = other
            index -= 1
        scratch_row(world, SHORT)[index] = slot_id
        count += 1
    return count


@inner
def _candidates(world, lane_id):
    """Who could be preempted now: admissions in row INPUT, slots in row CANDIDATES.

    Those of this lane and of lanes that wait for memory; what is in flight cannot be taken.
    """
    instance = instance_at(world, lane_at(world, lane_id).instance)
    count = 0
    for other in range(instance.first_lane, instance.first_lane + instance.num_lanes):
        lane = lane_at(world, other)
        if other != lane_id and lane.state == BUSY:
            continue
        for place in range(lane.num_running):
            count = _candidate(world, count, row_of(world, other, RUNS)[place])
        for place in range(lane.num_computing):
            count = _candidate(world, count, row_of(world, other, COMPUTES)[place])
    return count


@inner
def _candidate(world, count, slot_id):
    scratch_row(world, INPUT)[count] = slot_at(world, slot_id).admission
    scratch_row(world, CANDIDATES)[count] = slot_id
    return count + 1


@inner
def _preempt(world, slot_id):
    slot = slot_at(world, slot_id)
    instance = instance_at(world, slot.instance)
    lane = lane_at(world, slot.lane)
    block_size = world.block_size
    if slot.state == COMPUTING:
        stop_computing(world, slot_id)
        instance.free_blocks += blocks(slot.num_tokens, block_size)
        slot.num_recomputes += slot.num_uncomputed < slot.num_tokens
    else:
        instance.free_blocks += preempt_running(world, slot_id)
        slot.num_recomputes += 1
    instance.num_active -= 1
    lane.num_members -= 1
    slot.lane = NOBODY
    slot.state = WAITING
    slot.has_kv = False
    slot.need_blocks = blocks(slot.num_tokens, block_size)
    instance.promised_blocks += slot.need_blocks
    push_front(world, instance.queue, slot_id)


@inner
def stop_computing(world, slot_id):
    """Off the list of prompts that its lane computes."""
    lane_id = slot_at(world, slot_id).lane
    lane = lane_at(world, lane_id)
    place = find(world, lane_id, COMPUTES, lane.num_computing, slot_id)
    lane.num_computing -= 1
    for index in range(place, lane.num_computing):
        row_of(world, lane_id, COMPUTES)[index] = row_of(world, lane_id, COMPUTES)[index + 1]

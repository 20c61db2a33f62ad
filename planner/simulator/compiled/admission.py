"""Who joins an instance that decodes: bound by the router, admitted by the instance.

Both are first come first served. A request is bound when an instance has room (late binding),
so that no KV is stranded behind one full instance while another is free.
"""

from __future__ import annotations

from daskserve.planner.simulator.compiled.access import (
    instance_at,
    lane_at,
    queue_at,
    router_row,
    row_of,
    scratch_row,
    slot_at,
    times_at,
)
from daskserve.planner.simulator.compiled.agenda import schedule
from daskserve.planner.simulator.compiled.compiling import inner
from daskserve.planner.simulator.compiled.lists import (
    need_lookahead,
    pop_front,
    prompt_lookahead,
    push,
)
from daskserve.planner.simulator.compiled.memory import lane_source, note_peak
from daskserve.planner.simulator.compiled.pages import growth
from daskserve.planner.simulator.compiled.passes import (
    blocks,
    boundaries_until,
    boundary_s,
    first_boundary_at,
)
from daskserve.planner.simulator.compiled.policies import (
    NONE,
    decode_admissions,
    least_loaded,
    prefill_batch_size,
)
from daskserve.planner.simulator.compiled.records import (
    ACTIVE,
    BUSY,
    CHUNKED,
    COMPUTES,
    COMPUTING,
    IDLE,
    INPUT,
    MAX_ACTIVE,
    PULLED,
    READY_QUEUE,
    TOTAL,
    USED,
    WAITING,
)
from daskserve.planner.simulator.compiled.transfer import start_pull


@inner
def bind_ready(world, now):
    """Send waiting requests to the least loaded instance with room, until the first must wait."""
    if queue_at(world, READY_QUEUE).count == 0:
        return
    count = world.num_instances
    used, total = router_row(world, USED)[:count], router_row(world, TOTAL)[:count]
    active, most = router_row(world, ACTIVE)[:count], router_row(world, MAX_ACTIVE)[:count]
    for instance_id in range(count):
        _observe(world, instance_id, now)
    while queue_at(world, READY_QUEUE).count > 0:
        slot = slot_at(world, queue_at(world, READY_QUEUE).head)
        need = blocks(slot.num_tokens, world.block_size)
        booking = need
        if world.max_tokens > 0:
            booking = blocks(slot.prompt_tokens + world.max_tokens - 1, world.block_size)
        chosen = least_loaded(used, total, active, most, booking)
        if chosen == NONE:
            break
        used[chosen] += booking
        active[chosen] += 1
        slot_id = pop_front(world, READY_QUEUE)
        slot.state = WAITING
        slot.instance = chosen
        slot.need_blocks = need
        slot.booked_blocks = booking
        instance = instance_at(world, chosen)
        instance.promised_blocks += need
        instance.booked_blocks += booking
        push(world, instance.queue, slot_id)
        if not instance.is_blocked:
            wake(world, chosen, now)


@inner
def wake(world, instance_id, now):
    """Have the instance decide again: at once if it idles, else when its iteration ends.

    Pages for a KV that waits elsewhere are reserved beside the step under way, as in the engine.
    """
    instance = instance_at(world, instance_id)
    for lane_id in range(instance.first_lane, instance.first_lane + instance.num_lanes):
        if lane_at(world, lane_id).state == IDLE:
            schedule(world, lane_source(world, lane_id), now)
            return
    cut_short(world, instance.first_lane, now)
    if world.mode == PULLED:
        admit_pulled(world, instance_id, now)


@inner
def cut_short(world, lane_id, now):
    """End the lane's run of iterations at the first boundary from ``now`` on."""
    lane = lane_at(world, lane_id)
    if lane.state == BUSY and lane.planned > 1:
        count = first_boundary_at(lane, now)
        if count < lane.planned:
            lane.planned = count
            schedule(world, lane_source(world, lane_id), boundary_s(lane, count))


@inner
def admit_pulled(world, instance_id, now):
    """DECODE: reserve pages for the head of the queue and pull its KV into them."""
    instance = instance_at(world, instance_id)
    max_active = times_at(world, instance.times).max_batch * instance.num_lanes
    num_needs = need_lookahead(world, instance.queue, max_active - instance.num_active)
    count = decode_admissions(
        scratch_row(world, INPUT)[:num_needs],
        instance.free_blocks - _grown(world, instance.first_lane, now),
        instance.num_active,
        max_active,
        instance.num_running,
    )
    for _ in range(count):
        lane_id = _emptiest_lane(world, instance)
        slot_id = _reserve(world, instance_id, lane_id)
        if slot_at(world, slot_id).has_kv:
            start_pull(world, slot_id, now)
        else:
            _start_computing(world, slot_id)
            if lane_at(world, lane_id).state == IDLE:
                schedule(world, lane_source(world, lane_id), now)
    note_peak(instance)
    instance.is_blocked = queue_at(world, instance.queue).count > 0


@inner
def admit_prompts(world, lane_id, now):
    """COLOCATED: prompts that this lane computes next, within its token budget and memory."""
    lane = lane_at(world, lane_id)
    instance = instance_at(world, lane.instance)
    times = times_at(world, instance.times)
    if world.mode == CHUNKED:
        num_admitted = _admit_chunked(world, lane_id)
    else:
        num_admitted = _count_prompts(world, lane_id, times.max_batch, times.budget_tokens)
        _compute(world, lane_id, num_admitted)
    note_peak(instance)
    instance.is_blocked = queue_at(world, instance.queue).count > 0
    if num_admitted > 0 and instance.is_blocked:
        # Perhaps only this lane's budget was the limit.
        wake_idle(world, lane.instance, now)


@inner
def _admit_chunked(world, lane_id):
    lane = lane_at(world, lane_id)
    budget = world.chunk_tokens - lane.num_running
    for place in range(lane.num_computing):
        budget -= slot_at(world, row_of(world, lane_id, COMPUTES)[place]).num_uncomputed
    num_admitted = 0
    # One by one: the last prompt may begin in this step and end in a later one.
    while (budget > 0 or lane.num_computing == 0) and _count_prompts(world, lane_id, 1, 1) > 0:
        budget -= _compute(world, lane_id, 1)
        num_admitted += 1
    return num_admitted


@inner
def _count_prompts(world, lane_id, limit, budget_tokens):
    """How many prompts may be admitted now, at most ``limit``."""
    lane = lane_at(world, lane_id)
    instance = instance_at(world, lane.instance)
    most = min(times_at(world, instance.times).max_batch - lane.num_members, limit)
    num_lengths = prompt_lookahead(world, instance.queue, most, budget_tokens)
    # One page for each running request stays free, so that a new prompt does not at once
    # preempt what runs.
    free_blocks = instance.free_blocks - instance.num_running
    lengths = scratch_row(world, INPUT)[:num_lengths]
    return prefill_batch_size(lengths, budget_tokens, free_blocks, world.block_size, most)


@inner
def _compute(world, lane_id, count):
    """Move the head of the queue to what the lane computes; its tokens."""
    num_tokens = 0
    for _ in range(count):
        slot_id = _reserve(world, lane_at(world, lane_id).instance, lane_id)
        _start_computing(world, slot_id)
        num_tokens += slot_at(world, slot_id).num_tokens
    return num_tokens


@inner
def wake_idle(world, instance_id, now):
    """Have the lanes without work look at the queue."""
    instance = instance_at(world, instance_id)
    for lane_id in range(instance.first_lane, instance.first_lane + instance.num_lanes):
        if lane_at(world, lane_id).state == IDLE:
            schedule(world, lane_source(world, lane_id), now)


@inner
def _observe(world, instance_id, now):
    """What the router sees of an instance's memory and slots.

    Where callers state an output limit, the router books pages for it, as the service does;
    else it sees pages in use or promised, and keeps one for each request that runs.
    """
    instance = instance_at(world, instance_id)
    times = times_at(world, instance.times)
    used = instance.booked_blocks
    if world.max_tokens == 0:
        used = instance.total_blocks - instance.free_blocks + instance.promised_blocks
        used += instance.num_running + _grown(world, instance.first_lane, now)
    waiting = queue_at(world, instance.queue).count
    router_row(world, USED)[instance_id] = used
    router_row(world, TOTAL)[instance_id] = instance.total_blocks
    router_row(world, ACTIVE)[instance_id] = instance.num_active + waiting
    router_row(world, MAX_ACTIVE)[instance_id] = times.max_batch * instance.num_lanes


@inner
def _grown(world, lane_id, now):
    """Pages that the lane's run of iterations has taken so far, not yet booked."""
    lane = lane_at(world, lane_id)
    if lane.state != BUSY or lane.planned <= 1:
        return 0
    return growth(world, lane_id, min(boundaries_until(lane, now), lane.planned - 1))


@inner
def _reserve(world, instance_id, lane_id):
    instance = instance_at(world, instance_id)
    slot_id = pop_front(world, instance.queue)
    slot = slot_at(world, slot_id)
    instance.promised_blocks -= slot.need_blocks
    instance.free_blocks -= slot.need_blocks
    instance.num_active += 1
    instance.next_admission += 1
    slot.admission = instance.next_admission
    slot.lane = lane_id
    lane_at(world, lane_id).num_members += 1
    return slot_id


@inner
def _start_computing(world, slot_id):
    slot = slot_at(world, slot_id)
    lane = lane_at(world, slot.lane)
    slot.state = COMPUTING
    slot.num_uncomputed = slot.num_tokens
    row_of(world, slot.lane, COMPUTES)[lane.num_computing] = slot_id
    lane.num_computing += 1


@inner
def _emptiest_lane(world, instance):
    best = instance.first_lane
    for lane_id in range(instance.first_lane + 1, instance.first_lane + instance.num_lanes):
        if lane_at(world, lane_id).num_members < lane_at(world, best).num_members:
            best = lane_id
    return best

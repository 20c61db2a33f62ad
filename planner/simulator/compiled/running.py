"""The running requests of a lane: who ends when, how many context tokens, how many pages.

A running request costs nothing per iteration: its context is an offset from the lane's
iteration counter, and the one that ends next is at the top of a heap.
"""

from __future__ import annotations

from daskserve.planner.simulator.compiled.access import (
    instance_at,
    lane_at,
    phases_of,
    row_of,
    slot_at,
)
from daskserve.planner.simulator.compiled.compiling import inner
from daskserve.planner.simulator.compiled.passes import blocks
from daskserve.planner.simulator.compiled.records import ENDS_AT, NOBODY, RUNNING, RUNS, STARTS, TOP


@inner
def context_of(world, slot):
    """Tokens in the pool after the next step of a running request."""
    return slot.context_offset + lane_at(world, slot.lane).iteration


@inner
def is_covered(world, slot):
    """Whether the pages of a running request hold its next token."""
    lane = lane_at(world, slot.lane)
    if slot.cover_iteration == lane.iteration:
        return True
    return lane.grown_iteration == lane.iteration and slot.join_growth < lane.growths


@inner
def pages_of(world, slot):
    """Pages that a running request holds between two steps."""
    context = context_of(world, slot)
    held = context if is_covered(world, slot) else context - 1
    return blocks(held, world.block_size)


@inner
def is_short(world, slot):
    crosses = (context_of(world, slot) - 1) % world.block_size == 0
    return crosses and not is_covered(world, slot)


@inner
def start_running(world, slot_id, covered):
    """Into the decode batch of its lane; ``covered`` says that pages for its next token exist."""
    slot = slot_at(world, slot_id)
    lane = lane_at(world, slot.lane)
    slot.state = RUNNING
    slot.context_offset = slot.num_tokens - lane.iteration
    slot.cover_iteration = lane.iteration if covered else NOBODY
    slot.join_growth = lane.growths
    phases_of(world, slot.lane)[slot.context_offset % world.block_size] += 1
    lane.context_sum += slot.num_tokens
    if is_short(world, slot):
        lane.num_short += 1
    left = slot.output_tokens - (slot.num_tokens - slot.prompt_tokens)
    _push(world, slot.lane, lane.iteration + left, slot_id)
    instance_at(world, slot.instance).num_running += 1
    if slot.decode_started_s < 0:
        row_of(world, slot.lane, STARTS)[lane.num_starts] = slot_id
        lane.num_starts += 1


@inner
def preempt_running(world, slot_id):
    """Out of the decode batch before its end; returns the pages that it held."""
    slot = slot_at(world, slot_id)
    lane_id = slot.lane
    lane = lane_at(world, lane_id)
    pages = pages_of(world, slot)
    if is_short(world, slot):
        lane.num_short -= 1
    slot.num_tokens = context_of(world, slot)
    _forget(world, slot)
    _remove(world, lane_id, find(world, lane_id, RUNS, lane.num_running, slot_id))
    place = find(world, lane_id, STARTS, lane.num_starts, slot_id)
    if place != NOBODY:
        lane.num_starts -= 1
        row_of(world, lane_id, STARTS)[place] = row_of(world, lane_id, STARTS)[lane.num_starts]
    return pages


@inner
def pop_ended(world, lane_id):
    """A request whose last token is out, taken off the batch; NOBODY when none is."""
    lane = lane_at(world, lane_id)
    if lane.num_running == 0 or row_of(world, lane_id, ENDS_AT)[0] > lane.iteration:
        return NOBODY
    slot_id = row_of(world, lane_id, RUNS)[0]
    slot = slot_at(world, slot_id)
    # The last token is never fed back: its context is one less than that of a next step.
    slot.num_tokens = context_of(world, slot)
    _forget(world, slot)
    _remove(world, lane_id, TOP)
    return slot_id


@inner
def find(world, lane_id, row, count, slot_id):
    """Place of a slot in a row of the lane's table, or NOBODY."""
    for place in range(count):
        if row_of(world, lane_id, row)[place] == slot_id:
            return place
    return NOBODY


@inner
def _forget(world, slot):
    lane = lane_at(world, slot.lane)
    phases_of(world, slot.lane)[slot.context_offset % world.block_size] -= 1
    lane.context_sum -= context_of(world, slot)
    instance_at(world, slot.instance).num_running -= 1


@inner
def _push(world, lane_id, ends_at, slot_id):
    ends, runs = row_of(world, lane_id, ENDS_AT), row_of(world, lane_id, RUNS)
    lane = lane_at(world, lane_id)
    place = lane.num_running
    lane.num_running += 1
    _rise(ends, runs, place, ends_at, slot_id)


@inner
def _remove(world, lane_id, place):
    ends, runs = row_of(world, lane_id, ENDS_AT), row_of(world, lane_id, RUNS)
    lane = lane_at(world, lane_id)
    lane.num_running -= 1
    size = lane.num_running
    if place == size:
        return
    # The last one takes the place, and moves up or down from there.
    ends_at = ends[size]
    slot_id = runs[size]
    while True:
        child = 2 * place + 1
        if child + 1 < size and ends[child + 1] < ends[child]:
            child += 1
        if child >= size or ends[child] >= ends_at:
            break
        ends[place] = ends[child]
        runs[place] = runs[child]
        place = child
    _rise(ends, runs, place, ends_at, slot_id)


@inner
def _rise(ends, runs, place, ends_at, slot_id):
    while place > 0:
        parent = (place - 1) // 2
        if ends[parent] <= ends_at:
            break
        ends[place] = ends[parent]
        runs[place] = runs[parent]
        place = parent
    ends[place] = ends_at
    runs[place] = slot_id

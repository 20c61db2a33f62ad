"""The event loop: takes the next event and has its source act, until it must return.

It returns when nothing will happen any more, or when Python has to give it arrivals, room for
more live requests or an empty output; then it is called again with the same world.
"""

from __future__ import annotations

from numba import njit

from daskserve.planner.simulator.compiled import agenda
from daskserve.planner.simulator.compiled.access import (
    event_at,
    instance_at,
    prefill_at,
    queue_at,
    slot_at,
)
from daskserve.planner.simulator.compiled.admission import bind_ready
from daskserve.planner.simulator.compiled.compiling import inlined, inner, source_digest
from daskserve.planner.simulator.compiled.ending import finish, reject
from daskserve.planner.simulator.compiled.lists import pop_front, push, take_slot
from daskserve.planner.simulator.compiled.memory import lane_source
from daskserve.planner.simulator.compiled.passes import blocks
from daskserve.planner.simulator.compiled.prefilling import (
    finish_batch,
    queue_for_prefill,
    start_batch,
)
from daskserve.planner.simulator.compiled.records import (
    DRAINED,
    LANDING_QUEUE,
    NEEDS_ARRIVALS,
    NEEDS_OUTPUT,
    NEEDS_SLOTS,
    NOBODY,
    PAUSED,
    PULLED,
    READY,
    READY_QUEUE,
)
from daskserve.planner.simulator.compiled.stepping import end_step, land
from daskserve.planner.simulator.compiled.transfer import finish_transfer, landing_s


def _entry(digest):
    # numba keeps a compiled function on disk until its own file changes, although it holds the
    # functions that it calls as well: an edited policy would go on being simulated as it was.
    # What a function closes over is part of its key on disk, so here it is all their sources.
    @njit(nogil=True, error_model="numpy", cache=True)
    def run(worlds, arrival_s, prompt_tokens, output_tokens, max_events):
        """Run until the world needs something from outside; returns what, see ``records``."""
        worlds[0].source_digest = digest
        return _run(worlds[0], arrival_s, prompt_tokens, output_tokens, max_events)

    return run


@inlined
def _run(world, arrival_s, prompt_tokens, output_tokens, max_events):
    if world.next_arrival < len(arrival_s) and not agenda.is_scheduled(world, agenda.ARRIVALS):
        agenda.schedule(world, agenda.ARRIVALS, arrival_s[world.next_arrival])
    for _ in range(max_events):
        if world.next_arrival == len(arrival_s) and not world.is_last_chunk:
            return NEEDS_ARRIVALS
        if world.free_slot == NOBODY:
            return NEEDS_SLOTS
        if world.num_done + world.max_batch > world.done_size:
            return NEEDS_OUTPUT
        source = agenda.pop(world)
        if source == NOBODY:
            return DRAINED
        now = event_at(world, source).time_s
        world.now_s = now
        world.num_events += 1
        if source == agenda.ARRIVALS:
            index = world.next_arrival
            world.next_arrival += 1
            _arrive(world, arrival_s[index], prompt_tokens[index], output_tokens[index])
            if world.next_arrival < len(arrival_s):
                agenda.schedule(world, agenda.ARRIVALS, arrival_s[world.next_arrival])
        else:
            _act(world, source, now)
    return PAUSED


@inlined
def _act(world, source, now):
    if source >= lane_source(world, 0):
        end_step(world, source - lane_source(world, 0), now)
    elif source == agenda.LINKS:
        slot_id = finish_transfer(world, now)
        if slot_id != NOBODY:
            land(world, slot_id, now)
    elif source == agenda.LANDINGS:
        land(world, pop_front(world, LANDING_QUEUE), now)
        if queue_at(world, LANDING_QUEUE).count > 0:
            following = slot_at(world, queue_at(world, LANDING_QUEUE).head)
            agenda.schedule(world, agenda.LANDINGS, landing_s(following))
    elif (source - agenda.FIRST_PREFILL) % 2 == 0:
        finish_batch(world, (source - agenda.FIRST_PREFILL) // 2, now)
        bind_ready(world, now)
    else:
        start_batch(world, (source - agenda.FIRST_PREFILL) // 2, now)


@inner
def _arrive(world, now, prompt_tokens, output_tokens):
    slot_id = take_slot(world)
    slot = slot_at(world, slot_id)
    slot.request_id = world.num_arrived
    world.num_arrived += 1
    slot.arrival_s = now
    slot.prefill_started_s = -1.0
    slot.first_token_s = -1.0
    slot.decode_started_s = -1.0
    slot.transfer_s = 0.0
    slot.prompt_tokens = prompt_tokens
    slot.output_tokens = output_tokens
    if world.max_tokens > 0:
        slot.output_tokens = min(output_tokens, world.max_tokens)
    slot.num_tokens = prompt_tokens
    slot.num_recomputes = 0
    slot.prefill = NOBODY
    slot.instance = NOBODY
    slot.has_kv = world.mode == PULLED
    if not _can_ever_fit(world, slot):
        reject(world, slot_id)
    elif world.num_prefills > 0:
        queue_for_prefill(world, slot_id, now)
    else:
        _await_instance(world, slot_id, now)


@inner
def _await_instance(world, slot_id, now):
    """Colocated, or decode alone: its first token then comes from elsewhere, at once."""
    slot = slot_at(world, slot_id)
    if world.mode == PULLED:
        slot.prefill_started_s = now
        slot.first_token_s = now
        slot.num_tokens += 1
        if slot.output_tokens == 1:
            finish(world, slot_id, now)
            return
    slot.state = READY
    push(world, READY_QUEUE, slot_id)
    bind_ready(world, now)


@inner
def _can_ever_fit(world, slot):
    """Whether pools are large enough, as the engine checks before it accepts a request."""
    block_size = world.block_size
    prompt_blocks = blocks(slot.prompt_tokens, block_size)
    for prefill_id in range(world.num_prefills):
        if prompt_blocks > prefill_at(world, prefill_id).total_blocks:
            return False
    limit = world.max_tokens if world.max_tokens > 0 else slot.output_tokens
    # The last token is never fed back.
    most_blocks = blocks(slot.prompt_tokens + limit - 1, block_size)
    for instance_id in range(world.num_instances):
        if most_blocks > instance_at(world, instance_id).total_blocks:
            return False
    return True


run = _entry(source_digest())

"""KV transfers: every instance has one link, which its concurrent pulls share in equal parts.

A pull runs at the smaller of its two shares (that of the prefill instance's link and that of
the decode instance's); what the other link could have given beyond that is not passed on. The
latency of the link comes after the last byte. A finished pull frees the prefill instance's
pages.
"""

from __future__ import annotations

import math

from daskserve.planner.simulator.compiled.access import (
    instance_at,
    prefill_at,
    pull_at,
    queue_at,
    slot_at,
)
from daskserve.planner.simulator.compiled.agenda import LANDINGS, LINKS, schedule
from daskserve.planner.simulator.compiled.compiling import inner
from daskserve.planner.simulator.compiled.lists import push
from daskserve.planner.simulator.compiled.passes import blocks
from daskserve.planner.simulator.compiled.records import LANDING_QUEUE, NOBODY, PULLING


@inner
def start_pull(world, slot_id, now):
    """The decode instance has reserved the pages: whole pages of the prompt go over."""
    slot = slot_at(world, slot_id)
    slot.state = PULLING
    slot.pull_started_s = now
    pull = pull_at(world, world.num_pulls)
    world.num_pulls += 1
    pull.slot = slot_id
    pull.bytes_left = blocks(slot.prompt_tokens, world.block_size) * world.block_bytes
    pull.rate = 0.0
    pull.updated_s = now
    instance_at(world, slot.instance).num_pulls += 1
    if slot.prefill != NOBODY:
        prefill_at(world, slot.prefill).num_pulls += 1
    _share_again(world, slot.prefill, slot.instance, now)


@inner
def finish_transfer(world, now):
    """Event: the last byte of a pull is over. Returns its slot if there is no latency to wait."""
    index = _next_done(world)
    slot_id = pull_at(world, index).slot
    _remove(world, index)
    slot = slot_at(world, slot_id)
    slot.transfer_s += now + world.link_latency_s - slot.pull_started_s
    instance_at(world, slot.instance).num_pulls -= 1
    if slot.prefill != NOBODY:
        prefill_at(world, slot.prefill).num_pulls -= 1
    _share_again(world, slot.prefill, slot.instance, now)
    if world.link_latency_s == 0:
        return slot_id
    # Latency is the same for all, so pulls land in the order in which they ended.
    push(world, LANDING_QUEUE, slot_id)
    if queue_at(world, LANDING_QUEUE).count == 1:
        schedule(world, LANDINGS, landing_s(slot))
    return NOBODY


@inner
def landing_s(slot):
    """When a finished transfer is seen by the decode instance."""
    return slot.pull_started_s + slot.transfer_s


@inner
def _share_again(world, prefill_id, instance_id, now):
    """A pull on these links began or ended: the others on them go faster or slower from now."""
    for index in range(world.num_pulls):
        pull = pull_at(world, index)
        slot = slot_at(world, pull.slot)
        if slot.instance != instance_id and (slot.prefill != prefill_id or prefill_id == NOBODY):
            continue
        instance = instance_at(world, slot.instance)
        rate = instance.link_bandwidth / instance.num_pulls
        if slot.prefill != NOBODY:
            prefill = prefill_at(world, slot.prefill)
            rate = min(rate, prefill.link_bandwidth / prefill.num_pulls)
        if rate == pull.rate:
            continue
        if now > pull.updated_s:
            pull.bytes_left = max(pull.bytes_left - pull.rate * (now - pull.updated_s), 0.0)
        pull.rate = rate
        pull.updated_s = now
        pull.done_s = now if math.isinf(rate) else now + pull.bytes_left / rate
    if world.num_pulls > 0:
        schedule(world, LINKS, pull_at(world, _next_done(world)).done_s)


@inner
def _remove(world, index):
    world.num_pulls -= 1
    gone = pull_at(world, index)
    last = pull_at(world, world.num_pulls)
    gone.slot = last.slot
    gone.bytes_left = last.bytes_left
    gone.rate = last.rate
    gone.updated_s = last.updated_s
    gone.done_s = last.done_s


@inner
def _next_done(world):
    first = 0
    for index in range(1, world.num_pulls):
        if pull_at(world, index).done_s < pull_at(world, first).done_s:
            first = index
    return first

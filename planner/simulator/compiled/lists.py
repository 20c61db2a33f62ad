"""First-in first-out lists of slots, and the slots that are free."""

from __future__ import annotations

from daskserve.planner.simulator.compiled.access import queue_at, scratch_row, slot_at
from daskserve.planner.simulator.compiled.compiling import inner
from daskserve.planner.simulator.compiled.records import FREE, INPUT, NOBODY


@inner
def push(world, queue_id, slot_id):
    queue = queue_at(world, queue_id)
    slot_at(world, slot_id).next = NOBODY
    if queue.count == 0:
        queue.head = slot_id
    else:
        slot_at(world, queue.tail).next = slot_id
    queue.tail = slot_id
    queue.count += 1


@inner
def push_front(world, queue_id, slot_id):
    queue = queue_at(world, queue_id)
    slot_at(world, slot_id).next = queue.head if queue.count > 0 else NOBODY
    queue.head = slot_id
    if queue.count == 0:
        queue.tail = slot_id
    queue.count += 1


@inner
def pop_front(world, queue_id):
    """The first slot of a queue that is not empty."""
    queue = queue_at(world, queue_id)
    slot_id = queue.head
    queue.head = slot_at(world, slot_id).next
    queue.count -= 1
    return slot_id


@inner
def take_slot(world):
    """A free slot for a new request; the loop has made sure that there is one."""
    slot_id = world.free_slot
    world.free_slot = slot_at(world, slot_id).next
    world.num_live += 1
    return slot_id


@inner
def give_slot(world, slot_id):
    slot_at(world, slot_id).state = FREE
    slot_at(world, slot_id).next = world.free_slot
    world.free_slot = slot_id
    world.num_live -= 1


@inner
def prompt_lookahead(world, queue_id, most, budget_tokens):
    """Lengths at the head of a queue, in row INPUT of scratch: how many were copied.

    A batch never holds more than ``most`` requests nor, after its first, more than the budget,
    so what lies beyond both is not copied.
    """
    count = 0
    total = 0
    slot_id = queue_at(world, queue_id).head
    left = min(most, queue_at(world, queue_id).count)
    while count < left:
        slot = slot_at(world, slot_id)
        scratch_row(world, INPUT)[count] = slot.num_tokens
        count += 1
        total += slot.num_tokens
        if total > budget_tokens:
            break
        slot_id = slot.next
    return count


@inner
def need_lookahead(world, queue_id, most):
    """Pages needed by the first ``most`` of a queue, in row INPUT of scratch: how many."""
    count = min(most, queue_at(world, queue_id).count)
    slot_id = queue_at(world, queue_id).head
    for index in range(count):
        scratch_row(world, INPUT)[index] = slot_at(world, slot_id).need_blocks
        slot_id = slot_at(world, slot_id).next
    return count

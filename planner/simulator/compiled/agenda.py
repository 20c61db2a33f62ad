"""What happens next: one pending event per source, in a heap ordered by time, priority, sequence.

Each source (the arrivals, an instance, a micro-batch, the links) has at most one next event,
which can be moved; so nothing stale is ever in the heap and its size is that of the deployment.
"""

from __future__ import annotations

import numpy as np

from daskserve.planner.simulator.compiled.access import event_at
from daskserve.planner.simulator.compiled.compiling import inner
from daskserve.planner.simulator.compiled.records import NOBODY, TOP

# At equal times, lower goes first. What frees memory or brings work comes before the decisions
# that can use it, so that a decision sees everything that happened up to its own time.
PREFILL_DONE = 0
TRANSFER_DONE = 1
PULL_DONE = 2
ARRIVAL = 3
STEP_END = 4
PREFILL_START = 5

# Sources; prefill instance p has FIRST_PREFILL + 2 p (its oldest batch leaves the pipeline) and
# the one after (a batch may start); then one per lane.
ARRIVALS, LINKS, LANDINGS, FIRST_PREFILL = np.arange(4)


@inner
def schedule(world, source, time_s):
    """Let ``source`` have its next event at ``time_s``, instead of the one it had, if any."""
    event = event_at(world, source)
    event.time_s = time_s
    event.sequence = world.next_sequence
    world.next_sequence += 1
    if event.position == NOBODY:
        _place(world, source, world.num_scheduled)
        world.num_scheduled += 1
        _rise(world, source)
    else:
        _rise(world, source)
        _sink(world, source)


@inner
def is_scheduled(world, source):
    return event_at(world, source).position != NOBODY


@inner
def pop(world):
    """The source whose event is next, taken off; NOBODY when nothing will happen."""
    if world.num_scheduled == 0:
        return NOBODY
    first = event_at(world, 0).source
    world.num_scheduled -= 1
    last = event_at(world, world.num_scheduled).source
    event_at(world, first).position = NOBODY
    if last != first:
        _place(world, last, TOP)
        _sink(world, last)
    return first


@inner
def _place(world, source, position):
    event_at(world, position).source = source
    event_at(world, source).position = position


@inner
def _before(world, left, right):
    a = event_at(world, left)
    b = event_at(world, right)
    if a.time_s != b.time_s:
        return a.time_s < b.time_s
    if a.priority != b.priority:
        return a.priority < b.priority
    return a.sequence < b.sequence


@inner
def _rise(world, source):
    position = event_at(world, source).position
    while position > 0:
        parent = (position - 1) // 2
        other = event_at(world, parent).source
        if not _before(world, source, other):
            break
        _place(world, other, position)
        position = parent
    _place(world, source, position)


@inner
def _sink(world, source):
    position = event_at(world, source).position
    size = world.num_scheduled
    while True:
        child = 2 * position + 1
        if child >= size:
            break
        other = event_at(world, child).source
        if child + 1 < size and _before(world, event_at(world, child + 1).source, other):
            child += 1
            other = event_at(world, child).source
        if not _before(world, other, source):
            break
        _place(world, other, position)
        position = child
    _place(world, source, position)

"""How the KV pages of a running batch grow, counted for many iterations at once.

A request takes a new page whenever its context reaches one token more than a multiple of the
page size. Requests are counted by the phase of that rhythm, so the growth of any number of
iterations is a sum over at most one period.
"""

from __future__ import annotations

from daskserve.planner.simulator.compiled.access import lane_at, phases_of
from daskserve.planner.simulator.compiled.compiling import inner


@inner
def growth_at(world, lane_id, iteration):
    """Running requests that need a new page before the given decode iteration."""
    block_size = world.block_size
    return phases_of(world, lane_id)[(1 - iteration) % block_size]


@inner
def growth(world, lane_id, count):
    """Pages taken before the next ``count`` iterations after the current one."""
    lane = lane_at(world, lane_id)
    block_size = world.block_size
    periods = count // block_size
    total = periods * lane.num_running
    for step in range(periods * block_size + 1, count + 1):
        total += growth_at(world, lane_id, lane.iteration + step)
    return total


@inner
def iterations_within(world, lane_id, count, free_blocks):
    """Iterations, at most ``count``, until pages run out before the one that would follow."""
    lane = lane_at(world, lane_id)
    block_size = world.block_size
    if (count // block_size + 1) * lane.num_running <= free_blocks:
        return count
    periods = min(free_blocks // lane.num_running, count // block_size)
    step = periods * block_size
    left = free_blocks - periods * lane.num_running
    while step < count:
        step += 1
        left -= growth_at(world, lane_id, lane.iteration + step)
        if left < 0:
            return step
    return count

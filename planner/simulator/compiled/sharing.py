"""Instances that share a machine: a step takes longer while the other role computes beside it.

They compete for memory bandwidth, caches and the cores of everything else. When an instance of
one role begins or ends to compute, whatever the other role has under way goes on at another pace.
"""

from __future__ import annotations

from daskserve.planner.simulator.compiled.access import (
    flight_at,
    instance_at,
    lane_at,
    prefill_at,
    stage_at,
)
from daskserve.planner.simulator.compiled.agenda import FIRST_PREFILL, schedule
from daskserve.planner.simulator.compiled.compiling import inner
from daskserve.planner.simulator.compiled.memory import lane_source
from daskserve.planner.simulator.compiled.passes import boundary_s
from daskserve.planner.simulator.compiled.records import BUSY


@inner
def count_prefill(world, change, now):
    """A prefill instance begins (1) or ends (-1) to compute."""
    if world.decode_slowdown == 0 and world.prefill_slowdown == 0:
        return
    world.num_busy_prefills += change
    pace = 1.0 + world.decode_slowdown * world.num_busy_prefills
    ratio = pace / world.decode_pace
    if ratio == 1.0:
        return
    world.decode_pace = pace
    for instance_id in range(world.num_instances):
        lane_id = instance_at(world, instance_id).first_lane
        if lane_at(world, lane_id).is_counted:
            _stretch_lane(world, lane_id, ratio, now)


@inner
def count_lane(world, lane_id, now):
    """After a decision of a decode instance: it computes, or it does not."""
    if world.decode_slowdown == 0 and world.prefill_slowdown == 0:
        return
    lane = lane_at(world, lane_id)
    is_busy = lane.state == BUSY
    if is_busy == lane.is_counted:
        return
    lane.is_counted = is_busy
    world.num_busy_lanes += 1 if is_busy else -1
    pace = 1.0 + world.prefill_slowdown * world.num_busy_lanes
    ratio = pace / world.prefill_pace
    if ratio == 1.0:
        return
    world.prefill_pace = pace
    for prefill_id in range(world.num_prefills):
        if prefill_at(world, prefill_id).num_flights > 0:
            _stretch_prefill(world, prefill_id, ratio, now)


@inner
def _stretch_lane(world, lane_id, ratio, now):
    lane = lane_at(world, lane_id)
    instance = instance_at(world, lane.instance)
    if lane.num_chunks == 0:
        lane.started_s = now - (now - lane.started_s) * ratio
        lane.pace = world.decode_pace
        ends_s = boundary_s(lane, lane.planned)
    else:
        stage = stage_at(world, instance.first_stage)
        left_s = stage.free_s - now
        instance.busy_s += left_s * (ratio - 1.0)
        ends_s = stage.free_s = now + left_s * ratio
    schedule(world, lane_source(world, lane_id), max(ends_s, now))


@inner
def _stretch_prefill(world, prefill_id, ratio, now):
    prefill = prefill_at(world, prefill_id)
    flight = flight_at(world, prefill.first_flight + prefill.oldest)
    left_s = max(flight.done_s - now, 0.0)
    prefill.busy_s += left_s * (ratio - 1.0)
    flight.done_s = now + left_s * ratio
    stage_at(world, prefill.first_stage).free_s = flight.done_s
    schedule(world, FIRST_PREFILL + 2 * prefill_id, flight.done_s)

"""From a ``Deployment`` to an empty world, and more room in it while it runs."""

from __future__ import annotations

import numpy as np

from daskserve.planner.simulator.compiled import agenda
from daskserve.planner.simulator.compiled import records as r
from daskserve.planner.simulator.deployment import Deployment
from daskserve.planner.step_times import StepTimes

FIRST_SLOTS = 1024
"""Live requests that there is room for at first; doubled whenever they do not suffice."""

OUTPUT_ROWS = 16_384
"""Ended requests that are kept before Python takes them out."""

_MOST_BLOCKS = 2**31  # products of two block counts stay within int64


def build_tables(deployment: Deployment) -> r.Tables:
    """An empty deployment at time 0."""
    prefills = deployment.prefill_instances
    decodes = deployment.decode_instances
    everyone = (*prefills, *decodes)
    kinds = list({id(times): times for times in everyone}.values())
    kind_of = {id(times): index for index, times in enumerate(kinds)}
    times, knots, batches = _curves(kinds)
    num_lanes = sum(times.num_stages for times in decodes)
    max_batch = max(times.max_batch_size for times in everyone)
    most_members = max((t.max_batch_size * t.num_stages for t in decodes), default=0)
    tables = r.Tables(
        world=_records(r.WORLD, 1),
        slots=_records(r.SLOT, FIRST_SLOTS),
        queues=_records(r.QUEUE, int(r.FIRST_QUEUE) + len(everyone) + num_lanes),
        times=times,
        knots=knots,
        batches=batches,
        prefills=_records(r.PREFILL, len(prefills)),
        flights=_records(r.FLIGHT, sum(times.num_stages for times in prefills)),
        instances=_records(r.INSTANCE, len(decodes)),
        lanes=_records(r.LANE, num_lanes),
        rows=np.zeros((num_lanes, r.NUM_ROWS, max_batch), np.int64),
        phases=np.zeros((num_lanes, deployment.block_size), np.int64),
        stages=_records(r.STAGE, sum(times.num_stages for times in everyone)),
        pulls=_records(r.PULL, sum(t.max_batch_size * t.num_stages for t in decodes)),
        events=_records(r.EVENT, int(agenda.FIRST_PREFILL) + 2 * len(prefills) + num_lanes),
        router=np.zeros((6, max(len(prefills), len(decodes))), np.int64),
        scratch=np.zeros((3, max(max_batch, most_members)), np.int64),
        done=_records(r.DONE, OUTPUT_ROWS + max_batch),
    )
    _set_world(tables, deployment, max_batch)
    _set_prefills(tables, deployment, kind_of)
    _set_instances(tables, deployment, kind_of)
    _set_priorities(tables)
    _link_free(tables.slots, 0)
    tables.connect()
    return tables


def add_slots(tables: r.Tables) -> None:
    """Room for twice as many live requests."""
    old = len(tables.slots)
    slots = _records(r.SLOT, 2 * old)
    slots[:old] = tables.slots
    _link_free(slots, old)
    tables.world[0].free_slot = old
    tables.slots = slots
    tables.connect()


def _records(dtype: np.dtype, count: int) -> np.recarray:
    # Records with attributes also in interpreted Python, where the tests look at them.
    return np.zeros(count, dtype).view(np.recarray)


def _link_free(slots: np.recarray, first: int) -> None:
    slots["next"][first:] = np.arange(first + 1, len(slots) + 1)
    slots["next"][-1] = r.NOBODY


def _curves(kinds: list[StepTimes]) -> tuple[np.recarray, np.recarray, np.recarray]:
    times = _records(r.TIMES, len(kinds))
    knots = _records(r.KNOT, sum(len(kind.prefill_knots_s) for kind in kinds))
    batches = _records(r.BATCH, sum(kind.max_batch_size + 1 for kind in kinds))
    first_knot = first_batch = 0
    for row, kind in zip(times, kinds, strict=True):
        row.first_knot, row.num_knots = first_knot, len(kind.prefill_knots_s)
        row.quadratic_s, row.per_prompt_s = kind.prefill_quadratic_s, kind.prefill_per_prompt_s
        row.following_s = kind.prefill_following_s
        row.first_batch = first_batch
        row.num_stages, row.stage_overhead_s = kind.num_stages, kind.stage_overhead_s
        row.budget_tokens, row.max_batch = kind.prefill_budget_tokens, kind.max_batch_size
        here = slice(first_knot, first_knot + len(kind.prefill_knots_s))
        knots["tokens"][here] = kind.prefill_knots_tokens
        knots["seconds"][here] = kind.prefill_knots_s
        sizes = kind.max_batch_size + 1
        here = slice(first_batch, first_batch + sizes)
        batches["base_s"][here] = kind.decode_base_s[:sizes]
        batches["per_context_s"][here] = kind.decode_per_context_s[:sizes]
        first_knot += len(kind.prefill_knots_s)
        first_batch += sizes
    return times, knots, batches


def _set_world(tables: r.Tables, deployment: Deployment, max_batch: int) -> None:
    world = tables.world[0]
    modes = {"disaggregated": r.PULLED, "prefill_first": r.PREFILL_FIRST, "chunked": r.CHUNKED}
    world.mode = modes[deployment.mode]
    world.block_size = deployment.block_size
    world.chunk_tokens = deployment.chunk_tokens or 0
    world.max_tokens = deployment.max_tokens or 0
    world.block_bytes = deployment.block_size * deployment.kv_bytes_per_token
    world.link_latency_s = deployment.link_latency_s
    world.prefill_slowdown = deployment.prefill_slowdown
    world.decode_slowdown = deployment.decode_slowdown
    world.prefill_pace = world.decode_pace = 1.0
    world.max_batch = max_batch
    world.num_prefills, world.num_instances = deployment.num_prefill, deployment.num_decode
    world.router_size, world.scratch_size = tables.router.shape[1], tables.scratch.shape[1]
    world.done_size = len(tables.done)


def _num_blocks(deployment: Deployment, times: StepTimes) -> int:
    return min(times.kv_capacity_tokens // deployment.block_size, _MOST_BLOCKS)


def _set_prefills(tables: r.Tables, deployment: Deployment, kind_of: dict[int, int]) -> None:
    first_stage = 0
    for index, times in enumerate(deployment.prefill_instances):
        prefill = tables.prefills[index]
        prefill.ended_s = -np.inf
        prefill.times = kind_of[id(times)]
        prefill.queue = r.FIRST_QUEUE + index
        prefill.total_blocks = prefill.free_blocks = _num_blocks(deployment, times)
        prefill.first_stage = prefill.first_flight = first_stage
        prefill.link_bandwidth = deployment.link_bandwidth
        first_stage += times.num_stages


def _set_instances(tables: r.Tables, deployment: Deployment, kind_of: dict[int, int]) -> None:
    num_prefill = deployment.num_prefill
    first_stage = sum(times.num_stages for times in deployment.prefill_instances)
    first_lane = 0
    for index, times in enumerate(deployment.decode_instances):
        instance = tables.instances[index]
        instance.times = kind_of[id(times)]
        instance.queue = r.FIRST_QUEUE + num_prefill + index
        instance.total_blocks = instance.free_blocks = _num_blocks(deployment, times)
        instance.first_stage, instance.first_lane = first_stage, first_lane
        instance.num_lanes = times.num_stages
        bandwidth = deployment.decode_link_bandwidth
        instance.link_bandwidth = deployment.link_bandwidth if bandwidth is None else bandwidth
        for lane_id in range(first_lane, first_lane + times.num_stages):
            lane = tables.lanes[lane_id]
            lane.instance = index
            lane.grown_iteration = r.NOBODY
            lane.joining = r.FIRST_QUEUE + num_prefill + deployment.num_decode + lane_id
        first_stage += times.num_stages
        first_lane += times.num_stages


def _set_priorities(tables: r.Tables) -> None:
    events = tables.events
    events["position"] = r.NOBODY
    events["priority"] = agenda.STEP_END
    events["priority"][agenda.ARRIVALS] = agenda.ARRIVAL
    events["priority"][agenda.LINKS] = agenda.TRANSFER_DONE
    events["priority"][agenda.LANDINGS] = agenda.PULL_DONE
    lanes = agenda.FIRST_PREFILL + 2 * len(tables.prefills)
    events["priority"][agenda.FIRST_PREFILL : lanes : 2] = agenda.PREFILL_DONE
    events["priority"][agenda.FIRST_PREFILL + 1 : lanes : 2] = agenda.PREFILL_START

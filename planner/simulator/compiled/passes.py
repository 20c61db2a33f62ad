"""How long a pass of the model takes, and the closed forms for many decode iterations in a row.

Between two events of a lane its requests stay the same, so every iteration has the same number
of context tokens more than the last: durations are linear in the iteration index and their sum
over k iterations is a quadratic in k, evaluated and inverted here without walking through them.
"""

from __future__ import annotations

import math

from daskserve.planner.simulator.compiled.access import batch_at, knot_at, stage_at
from daskserve.planner.simulator.compiled.compiling import inner


@inner
def blocks(num_tokens, block_size):
    """Pages that ``num_tokens`` tokens occupy."""
    return (num_tokens + block_size - 1) // block_size


@inner
def tokens_s(world, times, num_tokens):
    """Seconds of one pass over so many tokens: linear between knots, the last slope goes on."""
    low = times.first_knot
    high = low + times.num_knots - 1
    while high - low > 1:
        middle = (low + high) // 2
        if knot_at(world, middle).tokens <= num_tokens:
            low = middle
        else:
            high = middle
    left = knot_at(world, low)
    right = knot_at(world, high)
    slope = (right.seconds - left.seconds) / (right.tokens - left.tokens)
    return left.seconds + slope * (num_tokens - left.tokens)


@inner
def mixed_s(world, times, num_tokens, squares, num_decoding, context_sum):
    """Seconds of one pass over prompt tokens and decoding requests together.

    The weights are read once: the tokens of both count as one pass, at least as long as the
    decode pass alone; attention of both comes on top.
    """
    batch = batch_at(world, times.first_batch + num_decoding)
    seconds = batch.base_s
    if num_tokens > 0:
        seconds = max(seconds, tokens_s(world, times, num_tokens + num_decoding))
    return seconds + times.quadratic_s * squares + batch.per_context_s * context_sum


@inner
def through_stages(world, first_stage, times, pass_s, now):
    """Send one pass through the pipeline; returns when it leaves. The first stage is free."""
    stage_s = pass_s / times.num_stages + times.stage_overhead_s
    leaves_s = now
    for stage in range(first_stage, first_stage + times.num_stages):
        leaves_s = max(leaves_s, stage_at(world, stage).free_s) + stage_s
        stage_at(world, stage).free_s = leaves_s
    return leaves_s


@inner
def iterations_s(lane, count):
    """Seconds that ``count`` decode iterations take from the start of the run, undisturbed."""
    tokens = count * lane.context_sum + lane.num_running * (count * (count - 1) // 2)
    return count * lane.base_s + lane.per_context_s * tokens


@inner
def boundary_s(lane, count):
    """When the ``count``-th iteration of the lane's run ends."""
    return lane.started_s + lane.pace * iterations_s(lane, count)


@inner
def first_boundary_at(lane, now):
    """Smallest number of iterations, at least 1, after which it is ``now`` or later."""
    count = max(1, _iterations_in(lane, (now - lane.started_s) / lane.pace))
    while count > 1 and boundary_s(lane, count - 1) >= now:
        count -= 1
    while boundary_s(lane, count) < now:
        count += 1
    return count


@inner
def boundaries_until(lane, now):
    """How many iterations of the lane's run have ended at ``now``."""
    count = max(0, _iterations_in(lane, (now - lane.started_s) / lane.pace))
    while count > 0 and boundary_s(lane, count) > now:
        count -= 1
    while count < lane.planned and boundary_s(lane, count + 1) <= now:
        count += 1
    return count


@inner
def _iterations_in(lane, seconds):
    # Root of curve * k^2 + slope * k = seconds, in the form that loses no digits; only a first
    # guess: the callers compare real boundaries.
    curve = lane.per_context_s * lane.num_running / 2
    slope = lane.base_s + lane.per_context_s * lane.context_sum - curve
    divisor = slope + math.sqrt(slope * slope + 4 * curve * max(seconds, 0.0))
    if divisor <= 0:
        return 0
    return int(min(2 * max(seconds, 0.0) / divisor, float(lane.planned)))

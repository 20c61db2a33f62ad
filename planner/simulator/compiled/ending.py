"""The end of a request: its timeline is written out and its slot is free again."""

from __future__ import annotations

import math

from daskserve.planner.simulator.compiled.access import done_at, slot_at
from daskserve.planner.simulator.compiled.compiling import inner
from daskserve.planner.simulator.compiled.lists import give_slot
from daskserve.planner.simulator.compiled.records import FINISHED, NOBODY, REJECTED


@inner
def finish(world, slot_id, now):
    """The last token is out: the five stages of DistServe section 6.3 in seconds."""
    slot = slot_at(world, slot_id)
    done = _next_done(world, slot)
    done.prefill_queue_s = slot.prefill_started_s - slot.arrival_s
    done.prefill_s = slot.first_token_s - slot.prefill_started_s
    if slot.decode_started_s >= 0:
        waited_s = slot.decode_started_s - slot.first_token_s - slot.transfer_s
        done.kv_transfer_s = slot.transfer_s
        # Rounding of the subtraction alone can make it negative.
        done.decode_queue_s = max(waited_s, 0.0)
        done.decode_s = now - slot.decode_started_s
    else:
        done.kv_transfer_s = 0.0
        done.decode_queue_s = 0.0
        done.decode_s = 0.0
    done.status = FINISHED
    give_slot(world, slot_id)


@inner
def reject(world, slot_id):
    """No pool of this deployment could ever hold the request."""
    done = _next_done(world, slot_at(world, slot_id))
    done.prefill_queue_s = math.nan
    done.prefill_s = math.nan
    done.kv_transfer_s = math.nan
    done.decode_queue_s = math.nan
    done.decode_s = math.nan
    done.prefill_instance = NOBODY
    done.decode_instance = NOBODY
    done.status = REJECTED
    give_slot(world, slot_id)


@inner
def _next_done(world, slot):
    done = done_at(world, world.num_done)
    world.num_done += 1
    world.num_ended += 1
    done.request_id = slot.request_id
    done.arrival_s = slot.arrival_s
    done.output_tokens = slot.output_tokens
    done.num_recomputes = slot.num_recomputes
    done.prefill_instance = slot.prefill
    done.decode_instance = slot.instance
    return done

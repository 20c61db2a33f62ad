"""Records of the world by index, from compiled code.

A compiled function that takes eighteen arrays copies eighteen array headers at every call; one
that takes the world's record copies a pointer. So the world holds the addresses of its tables,
and these functions turn an index into the record there. The Python side keeps the tables alive.
"""

from __future__ import annotations

from llvmlite import ir
from numba import carray, types
from numba.extending import intrinsic
from numba.np.numpy_support import from_dtype

from daskserve.planner.simulator.compiled import records as r
from daskserve.planner.simulator.compiled.compiling import inner


def _table(name, dtype):
    """A function ``(world, index) -> record``: entry ``index`` of the table ``world.<name>``."""
    record = from_dtype(dtype)
    offset = r.WORLD.fields[name][1]

    @intrinsic
    def record_at(typing_context, world, index):
        def generate(context, builder, signature, arguments):
            start_at, place = arguments
            word = context.get_value_type(types.int64)
            world_at = builder.ptrtoint(start_at, word)
            address_at = builder.add(world_at, ir.Constant(word, offset))
            start = builder.load(builder.inttoptr(address_at, word.as_pointer()))
            here = builder.add(start, builder.mul(place, ir.Constant(word, record.size)))
            return builder.inttoptr(here, context.get_value_type(record))

        return record(world, types.int64), generate

    return record_at


slot_at = _table("slots", r.SLOT)
queue_at = _table("queues", r.QUEUE)
times_at = _table("times", r.TIMES)
knot_at = _table("knots", r.KNOT)
batch_at = _table("batches", r.BATCH)
prefill_at = _table("prefills", r.PREFILL)
flight_at = _table("flights", r.FLIGHT)
instance_at = _table("instances", r.INSTANCE)
lane_at = _table("lanes", r.LANE)
stage_at = _table("stages", r.STAGE)
pull_at = _table("pulls", r.PULL)
event_at = _table("events", r.EVENT)
done_at = _table("done", r.DONE)


@intrinsic
def _pointer(typing_context, address):
    def generate(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], context.get_value_type(types.voidptr))

    return types.voidptr(types.int64), generate


@inner
def row_of(world, lane_id, row):
    """One row of a lane's table, int64 [max_batch]."""
    place = (lane_id * r.NUM_ROWS + row) * world.max_batch
    return carray(_pointer(world.rows + 8 * place), world.max_batch, types.int64)


@inner
def phases_of(world, lane_id):
    """Running requests of a lane by context_offset modulo page size, int64 [block_size]."""
    address = world.phases + 8 * lane_id * world.block_size
    return carray(_pointer(address), world.block_size, types.int64)


@inner
def router_row(world, row):
    """What the router knows of each instance, int64."""
    address = world.router + 8 * row * world.router_size
    return carray(_pointer(address), world.router_size, types.int64)


@inner
def scratch_row(world, row):
    """Room for a policy's input, int64 [scratch_size]; nothing in it outlives a decision."""
    address = world.scratch + 8 * row * world.scratch_size
    return carray(_pointer(address), world.scratch_size, types.int64)

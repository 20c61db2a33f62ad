"""The production scheduling policies, compiled: the very function objects that the engine calls."""

from __future__ import annotations

from daskserve.planner.simulator.compiled.compiling import inner
from daskserve.scheduling import batching, routing

prefill_batch_size = inner(batching.prefill_batch_size)
decode_admissions = inner(batching.decode_admissions)
preemption_victim = inner(batching.preemption_victim)
chunk_tokens = inner(batching.chunk_tokens)
shortest_queue = inner(routing.shortest_queue)
least_loaded = inner(routing.least_loaded)

NONE = batching.NONE

"""The state of a simulation as record arrays, so that the compiled event loop reads like objects.

Everything that lives is in ``Tables``: nothing else survives between two events, so a run can
stop after any event, be looked at, be given more room, and go on.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

TOP = np.int64(0)
"""Place of the first in a heap."""

NOBODY = np.int64(-1)
"""Index of no slot, no instance, no lane."""

# Where a request is; the pages that it holds follow from this.
FREE, QUEUED, PREFILLING, READY, WAITING, PULLING, JOINING, COMPUTING, RUNNING = np.arange(9)

# What a lane does.
IDLE, BUSY, STAGE_TAKEN, STALLED = np.arange(4)

# How prompts are computed by instances that decode.
PULLED, PREFILL_FIRST, CHUNKED = np.arange(3)

# How a request ended.
FINISHED, REJECTED = np.arange(2)

# Why the event loop returned.
DRAINED, NEEDS_ARRIVALS, NEEDS_SLOTS, NEEDS_OUTPUT, PAUSED = np.arange(5)

# Rows of ``Tables.rows``, one block of them per lane.
ENDS_AT, RUNS, COMPUTES, CHUNK_OF, CHUNK_TOKENS, STARTS = np.arange(6)
NUM_ROWS = 6

TABLES = (
    "slots", "queues", "times", "knots", "batches", "prefills", "flights", "instances", "lanes",
    "rows", "phases", "stages", "pulls", "events", "router", "scratch", "done",
)  # fmt: skip

SLOT = np.dtype(
    [
        ("request_id", "i8"),
        ("arrival_s", "f8"),
        ("prefill_started_s", "f8"),  # negative: not yet, as in the three below
        ("first_token_s", "f8"),
        ("pull_started_s", "f8"),
        ("decode_started_s", "f8"),
        ("transfer_s", "f8"),
        ("context_offset", "i8"),  # context of the next step = this + iteration of the lane
        ("cover_iteration", "i8"),  # iteration for which its pages are known to suffice
        ("join_growth", "i8"),  # growths of the lane when it joined
        ("admission", "i8"),
        ("prompt_tokens", "i8"),
        ("output_tokens", "i8"),  # physics alone may look at it, no decision does
        ("num_tokens", "i8"),  # prompt and output so far, while it does not run
        ("num_uncomputed", "i8"),
        ("need_blocks", "i8"),  # pages that it waits for
        ("booked_blocks", "i8"),  # pages that the router keeps for it until its end
        ("num_recomputes", "i8"),
        ("next", "i8"),  # link of whatever list it is in
        ("prefill", "i8"),
        ("instance", "i8"),
        ("lane", "i8"),
        ("state", "i1"),
        ("has_kv", "i1"),  # its prompt's KV is held by a prefill instance
    ],
    align=True,
)
"""One live request. Slots are reused, so that memory follows the backlog, not the trace."""

QUEUE = np.dtype([("head", "i8"), ("tail", "i4"), ("count", "i8")], align=True)

TIMES = np.dtype(
    [
        ("first_knot", "i8"),
        ("num_knots", "i8"),
        ("quadratic_s", "f8"),
        ("per_prompt_s", "f8"),
        ("following_s", "f8"),
        ("first_batch", "i8"),  # of ``Tables.batches``: entry for batch size 0
        ("num_stages", "i8"),
        ("stage_overhead_s", "f8"),
        ("budget_tokens", "i8"),
        ("max_batch", "i8"),  # of one micro-batch
    ],
    align=True,
)
"""One ``StepTimes``; the curves lie in ``Tables.knots`` and ``Tables.batches``."""

KNOT = np.dtype([("tokens", "f8"), ("seconds", "f8")], align=True)
BATCH = np.dtype([("base_s", "f8"), ("per_context_s", "f8")], align=True)

PREFILL = np.dtype(
    [
        ("times", "i8"),
        ("queue", "i8"),
        ("total_blocks", "i8"),
        ("free_blocks", "i8"),
        ("peak_blocks", "i8"),
        ("first_stage", "i8"),
        ("first_flight", "i8"),  # of ``Tables.flights``: a ring of ``num_stages`` batches
        ("oldest", "i8"),
        ("num_flights", "i8"),
        ("ended_s", "f8"),  # when the last batch left the pipeline
        ("is_full", "i1"),  # the head of the queue waits for memory
        ("num_pulls", "i8"),
        ("link_bandwidth", "f8"),
        ("busy_s", "f8"),
    ],
    align=True,
)
"""One prefill instance; ``busy_s`` sums over its stages."""

STAGE = np.dtype([("free_s", "f8")], align=True)
"""When a pipeline stage has passed on all that was sent through it."""

FLIGHT = np.dtype([("done_s", "f8"), ("head", "i8"), ("num_tokens", "i8")], align=True)
"""A prefill batch on its way through the pipeline; its slots are linked from ``head``."""

INSTANCE = np.dtype(
    [
        ("times", "i8"),
        ("queue", "i8"),
        ("total_blocks", "i8"),
        ("free_blocks", "i8"),
        ("promised_blocks", "i8"),  # needs of what waits in its queue
        ("booked_blocks", "i8"),
        ("peak_blocks", "i8"),
        ("num_active", "i8"),  # requests with pages
        ("num_running", "i8"),
        ("next_admission", "i8"),
        ("first_stage", "i8"),
        ("first_lane", "i8"),
        ("num_lanes", "i8"),
        ("is_blocked", "i1"),  # the head of its queue could not be admitted
        ("num_pulls", "i8"),
        ("link_bandwidth", "f8"),
        ("busy_s", "f8"),
    ],
    align=True,
)
"""One instance that decodes, disaggregated or colocated."""

LANE = np.dtype(
    [
        ("instance", "i8"),
        ("state", "i1"),
        ("decodes", "i1"),  # the pass in flight adds a token to what runs
        ("is_counted", "i1"),  # among the busy ones of the world
        ("iteration", "i8"),  # decode iterations done
        ("planned", "i8"),  # decode iterations until the next event of this lane
        ("started_s", "f8"),  # as if it had gone at its present pace from the start
        ("pace", "f8"),  # times as long as undisturbed
        ("began_s", "f8"),
        ("base_s", "f8"),  # of one iteration, without its context
        ("per_context_s", "f8"),
        ("num_running", "i8"),
        ("context_sum", "i8"),  # context tokens of the next iteration
        ("num_short", "i8"),  # running requests without a page for their next token
        ("growths", "i8"),
        ("grown_iteration", "i8"),
        ("num_computing", "i8"),
        ("num_chunks", "i8"),
        ("num_starts", "i8"),
        ("num_members", "i8"),  # active requests that belong to this lane
        ("joining", "i8"),  # queue of what was pulled and waits for the next step
    ],
    align=True,
)
"""One micro-batch of an instance; an instance has as many lanes as pipeline stages."""

PULL = np.dtype(
    [("slot", "i8"), ("bytes_left", "f8"), ("rate", "f8"), ("updated_s", "f8"), ("done_s", "f8")],
    align=True,
)
"""A KV transfer on its way."""

EVENT = np.dtype(
    [("time_s", "f8"), ("priority", "i8"), ("sequence", "i8"), ("position", "i8"), ("source", "i8")]
    , align=True,
)  # fmt: skip
"""Entry i: the next event of source i, and (field ``source``) who is at place i of the heap."""

WORLD = np.dtype(
    [
        ("source_digest", "i8"),  # of the code that ran it
        ("now_s", "f8"),
        ("num_scheduled", "i8"),
        ("next_sequence", "i8"),
        ("num_events", "i8"),
        ("next_arrival", "i8"),  # within the arrivals given to the loop
        ("num_arrived", "i8"),
        ("num_done", "i8"),  # rows of ``done`` not yet taken out
        ("num_ended", "i8"),
        ("free_slot", "i8"),
        ("num_live", "i8"),
        ("num_pulls", "i8"),
        ("is_last_chunk", "i1"),  # no arrivals come after those given
        # The deployment.
        ("mode", "i8"),
        ("block_size", "i8"),
        ("chunk_tokens", "i8"),
        ("max_tokens", "i8"),  # output limit that callers state; 0: none
        ("block_bytes", "f8"),
        ("link_latency_s", "f8"),
        ("prefill_slowdown", "f8"),  # how much longer beside a busy instance of the other role
        ("decode_slowdown", "f8"),
        ("num_busy_prefills", "i8"),
        ("num_busy_lanes", "i8"),
        ("prefill_pace", "f8"),  # times as long as undisturbed, now
        ("decode_pace", "f8"),
        ("max_batch", "i8"),
        ("num_prefills", "i8"),
        ("num_instances", "i8"),
        # Addresses of the tables, see ``Tables``, and sizes.
        *[(name, "i8") for name in TABLES],
        ("router_size", "i8"),
        ("scratch_size", "i8"),
        ("done_size", "i8"),
    ],
    align=True,
)
"""The record that every compiled function takes."""

DONE = np.dtype(
    [
        ("request_id", "i8"),
        ("arrival_s", "f8"),
        ("prefill_queue_s", "f8"),
        ("prefill_s", "f8"),
        ("kv_transfer_s", "f8"),
        ("decode_queue_s", "f8"),
        ("decode_s", "f8"),
        ("output_tokens", "i8"),
        ("num_recomputes", "i8"),
        ("prefill_instance", "i8"),
        ("decode_instance", "i8"),
        ("status", "i1"),
    ],
    align=True,
)
"""How a request went, in order of ending."""


@dataclass(slots=True, eq=False)
class Tables:
    """All state of a simulation: ``world`` is its record, the rest are the tables it points to."""

    world: np.recarray  # WORLD [1]
    slots: np.recarray  # SLOT
    queues: np.recarray  # QUEUE: ready, landing, one per prefill, per instance, per lane
    times: np.recarray  # TIMES
    knots: np.recarray  # KNOT
    batches: np.recarray  # BATCH
    prefills: np.recarray  # PREFILL
    flights: np.recarray  # FLIGHT
    instances: np.recarray  # INSTANCE
    lanes: np.recarray  # LANE
    rows: np.ndarray  # int64 [lanes, NUM_ROWS, max_batch]
    phases: np.ndarray  # int64 [lanes, block_size]: running requests by context_offset modulo
    stages: np.recarray  # STAGE: of prefills, then of instances
    pulls: np.recarray  # PULL
    events: np.recarray  # EVENT
    router: np.ndarray  # int64 [6, max(prefills, instances)]
    scratch: np.ndarray  # int64 [3, n]
    done: np.recarray  # DONE

    def connect(self) -> None:
        """Tell the world where its tables are; again after one was replaced."""
        for name in TABLES:
            self.world[0][name] = getattr(self, name).ctypes.data


READY_QUEUE, LANDING_QUEUE, FIRST_QUEUE = np.arange(3)
"""Places in ``Tables.queues``."""

QUEUED_TOKENS, QUEUED_REQUESTS, USED, TOTAL, ACTIVE, MAX_ACTIVE = np.arange(6)
"""Rows of ``Tables.router``: two for prefill instances, four for those that decode."""

INPUT, CANDIDATES, SHORT = np.arange(3)
"""Rows of ``Tables.scratch``: a policy's input, whose slots those are, who needs a page."""

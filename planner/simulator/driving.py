"""Feeds arrivals to the compiled loop and takes out what has ended.

Memory follows the backlog and the size of a chunk, not the length of the trace, so that a day
at 100 requests/s needs no more than a minute.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import ArrayLike

from daskserve.errors import WorkloadError
from daskserve.planner.simulator.building import add_slots, build_tables
from daskserve.planner.simulator.compiled import records as r
from daskserve.planner.simulator.compiled.loop import run
from daskserve.planner.simulator.deployment import Deployment

Chunk = tuple[np.ndarray, np.ndarray, np.ndarray]
"""``(arrival_s, prompt_tokens, output_tokens)``, sorted by arrival."""

CHUNK_REQUESTS = 65_536

_FOREVER = 2**62


class Simulation:
    """One run of a deployment; ``tables`` may be looked at between two calls.

    Parameters
    ----------
    chunks
        The trace in pieces; arrivals go on rising from one to the next.
    """

    def __init__(self, deployment: Deployment, chunks: Iterable[Chunk]) -> None:
        self.tables = build_tables(deployment)
        self._chunks = iter(chunks)
        self._arrivals = _as_chunk(((), (), ()))
        self._last_arrival_s = 0.0

    @property
    def now_s(self) -> float:
        """Time of the last event."""
        return float(self.tables.world[0].now_s)

    def ended(self, max_events: int = _FOREVER) -> Iterator[np.ndarray]:
        """Run to the end; yields ``DONE`` rows of what ended, each valid until the next.

        With ``max_events`` it also yields, perhaps nothing, after so many events.
        """
        status = r.NEEDS_ARRIVALS
        while status != r.DRAINED:
            status = run(self.tables.world, *self._arrivals, max_events)
            if status == r.NEEDS_ARRIVALS:
                self._feed()
            elif status == r.NEEDS_SLOTS:
                add_slots(self.tables)
            else:
                yield self._take_out()
        world = self.tables.world[0]
        if world.num_live > 0:
            raise RuntimeError(
                f"the simulation stopped with {world.num_live} requests that nothing can move:"
                " a bug, please report the deployment and the workload"
            )

    def _take_out(self) -> np.ndarray:
        world = self.tables.world[0]
        rows: np.ndarray = self.tables.done[: world.num_done]
        world.num_done = 0
        return rows

    def _feed(self) -> None:
        world = self.tables.world[0]
        chunk = next(self._chunks, None)
        world.next_arrival = 0
        if chunk is None:
            world.is_last_chunk = True
            self._arrivals = _as_chunk(((), (), ()))
            return
        self._arrivals = _as_chunk(chunk)
        arrival_s = self._arrivals[0]
        if len(arrival_s) and arrival_s[0] < self._last_arrival_s:
            raise WorkloadError(
                f"arrivals are not sorted: {arrival_s[0]:g} s comes after"
                f" {self._last_arrival_s:g} s; sort the trace first"
            )
        self._last_arrival_s = arrival_s[-1] if len(arrival_s) else self._last_arrival_s


def chunks_of(
    arrival_s: np.ndarray, prompt_tokens: np.ndarray, output_tokens: np.ndarray
) -> Iterator[Chunk]:
    """Arrays cut into chunks."""
    for start in range(0, len(arrival_s), CHUNK_REQUESTS):
        here = slice(start, start + CHUNK_REQUESTS)
        yield arrival_s[here], prompt_tokens[here], output_tokens[here]


def run_arrays(
    deployment: Deployment,
    arrival_s: np.ndarray,
    prompt_tokens: np.ndarray,
    output_tokens: np.ndarray,
) -> tuple[np.ndarray, Simulation]:
    """``DONE`` rows in order of arrival, and the simulation as it ended."""
    simulation = Simulation(deployment, chunks_of(arrival_s, prompt_tokens, output_tokens))
    done = np.zeros(len(arrival_s), r.DONE)
    for rows in simulation.ended():
        done[rows["request_id"]] = rows
    return done, simulation


def _as_chunk(chunk: Sequence[ArrayLike]) -> Chunk:
    # Writable copies of exactly these types: the loop is compiled for them alone.
    arrival_s, prompt_tokens, output_tokens = chunk
    return (
        np.array(arrival_s, np.float64),
        np.array(prompt_tokens, np.int64),
        np.array(output_tokens, np.int64),
    )

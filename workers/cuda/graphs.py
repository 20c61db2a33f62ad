"""Decode steps as CUDA graphs: one recording per batch size, replayed without any Python.

A batch is padded to the next size that there is a graph for. The rows that pad it read and write
the scratch page, which nobody owns.
"""

from __future__ import annotations

import bisect
import logging
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from daskserve.workers.cuda.attention import Attention
from daskserve.workers.cuda.step import DeviceStep, send, write_places
from daskserve.workers.forward import ForwardBatch

logger = logging.getLogger(__name__)

Run = Callable[[DeviceStep], torch.Tensor]
"""Runs the model over a step: float32 logits ``[R, vocab]``."""

_WARM_UPS = 2  # kernels are compiled, and libraries allocate, when they run first
_TWICE_UP_TO, _STEP = 16, 16


def bucket_sizes(max_rows: int) -> tuple[int, ...]:
    """1, 2, 4, 8, 16, then every 16 rows, and at last ``max_rows``."""
    sizes = {1, max_rows}
    sizes.update(1 << power for power in range(1, _TWICE_UP_TO.bit_length()))
    sizes.update(range(2 * _STEP, max_rows, _STEP))
    return tuple(sorted(size for size in sizes if size <= max_rows))


def bucket_for(num_rows: int, sizes: tuple[int, ...]) -> int | None:
    """The smallest size that holds so many rows; None when none does."""
    place = bisect.bisect_left(sizes, num_rows)
    return sizes[place] if place < len(sizes) else None


@dataclass(slots=True)
class _Recording:
    graph: torch.cuda.CUDAGraph
    fields: torch.Tensor  # int32 [5, rows]
    page_table: torch.Tensor
    logits: torch.Tensor


class DecodeGraphs:
    """Records decode steps when they are first needed, and replays them.

    Parameters
    ----------
    run
        What is recorded; must not wait for the device.
    attention
        Of the steps.
    pages
        The KV pool; a graph is good for this one only.
    max_rows, max_context
        Longest batch and longest row.
    """

    def __init__(
        self,
        run: Run,
        attention: Attention,
        pages: torch.Tensor,
        max_rows: int,
        max_context: int,
    ) -> None:
        self.sizes = bucket_sizes(max_rows)
        self._run = run
        self._attention = attention
        self._pages = pages
        block_size = pages.shape[4]
        self._width = min(-(-max_context // block_size), pages.shape[0])
        self._max_context = min(max_context, self._width * block_size)
        self._recordings: dict[int, _Recording] = {}
        self._memory = None
        self._is_possible = True

    def __len__(self) -> int:
        return len(self._recordings)

    def replay(self, batch: ForwardBatch) -> torch.Tensor | None:
        """Logits of a decode batch, in memory that the next replay overwrites.

        None: there is no graph for it.
        """
        size = bucket_for(batch.num_rows, self.sizes)
        if size is None or not self._is_possible:
            return None
        recording = self._recordings.get(size)
        if recording is None:
            recording = self._record(size)
            if recording is None:
                return None
        self._fill(recording, batch, size)
        recording.graph.replay()
        return recording.logits[: batch.num_rows]

    def record_all(self) -> None:
        """Record every size now, the largest first: the others then fit into its memory."""
        for size in reversed(self.sizes):
            if self._is_possible and size not in self._recordings:
                self._record(size)

    def _fill(self, recording: _Recording, batch: ForwardBatch, size: int) -> None:
        device = self._pages.device
        fields, table = padded_fields(batch, self._pages.shape[4], size)
        on_device = send([fields, table], device)
        recording.fields.copy_(on_device[0])
        recording.page_table[:, : table.shape[1]].copy_(on_device[1])

    def _record(self, size: int) -> _Recording | None:
        device = self._pages.device
        fields = torch.zeros(5, size, dtype=torch.int32, device=device)
        fields[CONTEXT] = 1
        table = torch.zeros(size, self._width, dtype=torch.int32, device=device)
        rows = torch.arange(size + 1, dtype=torch.int32, device=device)

        def run() -> torch.Tensor:
            return self._run(static_step(self, fields, table, rows))

        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream(device)
        try:
            for _ in range(_WARM_UPS):
                run()
            # Only what this thread does counts: others copy KV meanwhile.
            with torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"):
                logits = run()
        except RuntimeError as error:
            logger.warning("decode steps run without CUDA graphs: %s", error)
            self._is_possible = False
            torch.cuda.set_stream(stream)  # a recording that broke off leaves its own behind
            return None
        self._memory = self._memory or graph.pool()
        recording = _Recording(graph, fields, table, logits)
        self._recordings[size] = recording
        return recording

    @property
    def facts(self) -> tuple[Attention, torch.Tensor, int]:
        return self._attention, self._pages, self._max_context


TOKEN, POSITION, WRITE_PAGE, WRITE_SLOT, CONTEXT = range(5)


def padded_fields(batch: ForwardBatch, block_size: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    """A decode batch as int32 ``[5, size]`` and its page table ``[size, pages]``.

    Rows that pad hold one token of the scratch page.
    """
    rows = batch.num_rows
    fields = np.zeros((5, size), np.int32)
    fields[TOKEN, :rows] = batch.token_ids
    fields[POSITION, :rows] = batch.positions
    fields[WRITE_PAGE, :rows], fields[WRITE_SLOT, :rows] = write_places(batch, block_size)
    fields[CONTEXT, :rows] = batch.context_tokens
    fields[CONTEXT, rows:] = 1
    used = -(-int(batch.context_tokens.max()) // block_size)
    table = np.zeros((size, used), np.int32)
    table[:rows] = batch.page_table[:, :used]
    return fields, table


def static_step(
    graphs: DecodeGraphs, fields: torch.Tensor, table: torch.Tensor, rows: torch.Tensor
) -> DeviceStep:
    """A step over tensors whose contents are filled in before each replay."""
    attention, pages, max_context = graphs.facts
    size = fields.shape[1]
    return DeviceStep(
        attention=attention,
        pages=pages,
        token_ids=fields[TOKEN].long(),
        positions=fields[POSITION].long(),
        write_pages=fields[WRITE_PAGE].long(),
        write_slots=fields[WRITE_SLOT].long(),
        last_tokens=None,
        query_start=rows,
        context_tokens=fields[CONTEXT],
        page_table=table,
        tile_rows=rows[:size],
        tile_starts=rows[:size],
        max_query=1,
        max_context=max_context,
        is_fresh=False,
    )

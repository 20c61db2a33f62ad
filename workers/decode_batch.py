"""The running requests of a decode step as flat arrays, kept up to date row by row.

Rebuilding them in every step would cost more than the sampling; here a step adds one to three
arrays, and a request that leaves hands its row to the last one.
"""

from __future__ import annotations

import numpy as np

from daskserve.workers.forward import ForwardBatch
from daskserve.workers.sequence import Sequence

_PAGE_STEP = 8


class DecodeBatch:
    """Rows of running requests; row ``i`` belongs to ``sequences[i]``.

    Parameters
    ----------
    max_rows
        Most requests in one decode step.
    block_size
        Tokens per page.
    """

    def __init__(self, max_rows: int, block_size: int) -> None:
        self.sequences: list[Sequence] = []
        self._block_size = block_size
        self._token_ids = np.zeros(max_rows, np.int64)
        self._positions = np.zeros(max_rows, np.int64)
        self._context = np.zeros(max_rows, np.int32)
        self._capacity = np.zeros(max_rows, np.int32)
        self._query_start = np.arange(max_rows + 1, dtype=np.int32)
        self._page_table = np.zeros((max_rows, _PAGE_STEP), np.int32)

    def __len__(self) -> int:
        return len(self.sequences)

    def add(self, sequence: Sequence, pages: list[int]) -> None:
        """Append a row whose next step feeds the sequence's last token."""
        row = len(self.sequences)
        self.sequences.append(sequence)
        num_tokens = sequence.num_tokens
        self._token_ids[row] = sequence.output_ids[-1]
        self._positions[row] = num_tokens - 1
        self._context[row] = num_tokens
        self._capacity[row] = len(pages) * self._block_size
        self._widen(len(pages))
        self._page_table[row, : len(pages)] = pages
        self._page_table[row, len(pages) :] = 0

    def remove(self, sequence: Sequence) -> None:
        """Take a row out; the last row moves into its place."""
        row = self.sequences.index(sequence)
        moved = self.sequences.pop()
        if moved is not sequence:
            last = len(self.sequences)
            self.sequences[row] = moved
            for array in (self._token_ids, self._positions, self._context, self._capacity):
                array[row] = array[last]
            self._page_table[row] = self._page_table[last]

    def short_of_pages(self) -> list[Sequence]:
        """Sequences whose next token has no place in their pages, oldest admission first."""
        size = len(self.sequences)
        rows = np.flatnonzero(self._context[:size] > self._capacity[:size])
        return sorted((self.sequences[row] for row in rows), key=lambda s: s.admission)

    def add_page(self, sequence: Sequence, page: int) -> None:
        row = self.sequences.index(sequence)
        index = self._capacity[row] // self._block_size
        self._widen(index + 1)
        self._page_table[row, index] = page
        self._capacity[row] += self._block_size

    def advance(self, token_ids: np.ndarray) -> None:
        """Every row got its next token and its fed token's KV is written."""
        size = len(self.sequences)
        self._token_ids[:size] = token_ids
        self._positions[:size] += 1
        self._context[:size] += 1

    def forward_batch(self) -> ForwardBatch:
        """Views on the arrays: valid until the next change."""
        size = len(self.sequences)
        return ForwardBatch(
            token_ids=self._token_ids[:size],
            positions=self._positions[:size],
            query_start=self._query_start[: size + 1],
            context_tokens=self._context[:size],
            page_table=self._page_table[:size],
        )

    def _widen(self, num_pages: int) -> None:
        width = self._page_table.shape[1]
        if num_pages > width:
            # Rows stay contiguous; a doubled table is rarely widened again.
            extra = max(num_pages - width, width)
            self._page_table = np.pad(self._page_table, ((0, 0), (0, extra)))

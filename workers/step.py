"""What one engine step computes, and the packed batch that the model sees."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np

from daskserve.workers.decode_batch import DecodeBatch
from daskserve.workers.forward import ForwardBatch
from daskserve.workers.kv_pool import KVPool
from daskserve.workers.sequence import Sequence
from daskserve.workers.wave import Wave


@dataclass(frozen=True, slots=True)
class Chunk:
    """The next ``num_tokens`` tokens of a prompt (or of a sequence that is computed again)."""

    sequence: Sequence
    num_tokens: int

    @property
    def is_last(self) -> bool:
        return self.num_tokens == self.sequence.num_uncomputed


@dataclass(frozen=True, slots=True)
class Step:
    """Rows of one step: the decode batch, if any, then the chunks.

    ``wave`` is whose rows they are, in an engine that decodes.
    """

    chunks: Seq[Chunk]
    decode: DecodeBatch | None = None
    wave: Wave | None = None

    @property
    def sequences(self) -> list[Sequence]:
        running = self.decode.sequences if self.decode else []
        return [*running, *(chunk.sequence for chunk in self.chunks)]


def pack(step: Step, pool: KVPool) -> ForwardBatch:
    """The step as the model sees it."""
    if not step.chunks:
        return step.decode.forward_batch()
    prompts = _pack_chunks(step.chunks, pool)
    if step.decode is None:
        return prompts
    return _concatenated(step.decode.forward_batch(), prompts)


def _pack_chunks(chunks: Seq[Chunk], pool: KVPool) -> ForwardBatch:
    tables = [pool.pages_of(chunk.sequence.owner) for chunk in chunks]
    page_table = np.zeros((len(chunks), max(map(len, tables))), np.int32)
    for row, pages in enumerate(tables):
        page_table[row, : len(pages)] = pages
    starts = [chunk.sequence.num_computed for chunk in chunks]
    ends = [start + chunk.num_tokens for start, chunk in zip(starts, chunks, strict=True)]
    return ForwardBatch(
        token_ids=np.concatenate([c.sequence.next_tokens(c.num_tokens) for c in chunks]),
        positions=np.concatenate(
            [np.arange(start, end) for start, end in zip(starts, ends, strict=True)]
        ),
        query_start=np.cumsum([0, *(chunk.num_tokens for chunk in chunks)], dtype=np.int32),
        context_tokens=np.array(ends, np.int32),
        page_table=page_table,
    )


def _concatenated(first: ForwardBatch, second: ForwardBatch) -> ForwardBatch:
    width = max(first.page_table.shape[1], second.page_table.shape[1])
    tables = [
        np.pad(batch.page_table, ((0, 0), (0, width - batch.page_table.shape[1])))
        for batch in (first, second)
    ]
    return ForwardBatch(
        token_ids=np.concatenate([first.token_ids, second.token_ids]),
        positions=np.concatenate([first.positions, second.positions]),
        query_start=np.concatenate(
            [first.query_start, second.query_start[1:] + first.query_start[-1]]
        ),
        context_tokens=np.concatenate([first.context_tokens, second.context_tokens]),
        page_table=np.concatenate(tables),
    )

"""One step cut into micro-batches, so that all pipeline stages work at once.

The packed tokens are cut into equal parts: decode rows spread evenly, prompts by tokens, a long
prompt in chunks whose order the stages keep, so that each finds the KV of those before.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from daskserve.workers.forward import ForwardBatch

MIN_TOKENS = 128
"""Smaller micro-batches of prompts cost more, since products of few rows are slow, than they save
in waiting."""

MAX_PER_STAGE = 4


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """A part of a step.

    Parameters
    ----------
    batch
        Its tokens.
    rows
        int64: rows of the whole step that end in here, whose logits are wanted.
    last_tokens
        int64: where in this part their last tokens are.
    """

    batch: ForwardBatch
    rows: np.ndarray
    last_tokens: np.ndarray


def num_micro_batches(batch: ForwardBatch, num_stages: int, num_open: int = 0) -> int:
    """Into how many parts to cut a step while ``num_open`` others are under way.

    A step is cut only where the steps alone do not keep the stages at work, since every part reads
    the weights anew. Prompts are cut further then: with s stages and m parts a stage waits
    (s - 1) / (m + s - 1) of a step, and the first token comes the sooner.
    """
    if num_stages == 1:
        return 1
    needed = -(-num_stages // (num_open + 1))
    if batch.is_decode or needed == 1:
        return min(needed, batch.num_tokens)
    wanted = max(batch.num_tokens // MIN_TOKENS, needed)
    return min(wanted, num_stages * MAX_PER_STAGE, batch.num_tokens)


def micro_batches(batch: ForwardBatch, count: int) -> list[MicroBatch]:
    """Cut a step into ``count`` parts of equally many tokens, at least one each."""
    edges = [batch.num_tokens * index // count for index in range(count + 1)]
    return [_part(batch, *bounds) for bounds in zip(edges[:-1], edges[1:], strict=True)]


def _part(batch: ForwardBatch, first: int, end: int) -> MicroBatch:
    starts, ends = batch.query_start[:-1], batch.query_start[1:]
    rows = np.flatnonzero((starts < end) & (ends > first))
    bounds = np.clip(np.append(starts[rows], ends[rows[-1]]), first, end) - first
    left = ends[rows] - np.minimum(ends[rows], end)  # tokens that come in later parts
    part = ForwardBatch(
        token_ids=batch.token_ids[first:end],
        positions=batch.positions[first:end],
        query_start=bounds.astype(np.int32),
        context_tokens=(batch.context_tokens[rows] - left).astype(np.int32),
        page_table=batch.page_table[rows],
    )
    is_done = left == 0
    return MicroBatch(part, rows[is_done], bounds[1:][is_done] - 1)

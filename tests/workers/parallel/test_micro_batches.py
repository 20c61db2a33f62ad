from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from daskserve.workers.forward import ForwardBatch
from daskserve.workers.parallel.micro_batches import micro_batches, num_micro_batches
from daskserve.workers.parallel.wire import (
    StepOrder,
    pack_lists,
    pack_step,
    unpack_lists,
    unpack_step,
)

BLOCK = 4


@st.composite
def batches(draw) -> ForwardBatch:
    rows = draw(st.lists(st.tuples(st.integers(1, 30), st.integers(0, 20)), min_size=1, max_size=8))
    new = np.array([count for count, _ in rows])
    cached = np.array([count for _, count in rows])
    context = (new + cached).astype(np.int32)
    width = -(-int(context.max()) // BLOCK)
    return ForwardBatch(
        token_ids=np.arange(new.sum()),
        positions=np.concatenate([np.arange(c, c + n) for n, c in zip(new, cached, strict=True)]),
        query_start=np.cumsum([0, *new], dtype=np.int32),
        context_tokens=context,
        page_table=np.arange(len(rows) * width, dtype=np.int32).reshape(len(rows), width),
    )


@given(batches(), st.integers(1, 12))
def test_parts_are_the_step_in_order(batch, count):
    parts = micro_batches(batch, min(count, batch.num_tokens))
    assert len(parts) == min(count, batch.num_tokens)
    for name in ("token_ids", "positions"):
        joined = np.concatenate([getattr(part.batch, name) for part in parts])
        assert np.array_equal(joined, getattr(batch, name))
    sizes = [part.batch.num_tokens for part in parts]
    assert max(sizes) - min(sizes) <= 1
    assert [*np.concatenate([part.rows for part in parts])] == [*range(batch.num_rows)]


@given(batches(), st.integers(1, 12))
def test_every_token_of_a_part_sees_what_it_would_see_in_the_step(batch, count):
    for part in micro_batches(batch, min(count, batch.num_tokens)):
        starts = part.batch.query_start
        for row, context in enumerate(part.batch.context_tokens):
            own = part.batch.positions[starts[row] : starts[row + 1]]
            assert own.size > 0
            assert [*own] == [*range(context - own.size, context)]
        ends = part.batch.token_ids[part.last_tokens]
        assert np.array_equal(ends, batch.token_ids[batch.query_start[part.rows + 1] - 1])
        table = {tuple(pages) for pages in batch.page_table}
        assert {tuple(pages) for pages in part.batch.page_table} <= table


@given(batches(), st.integers(1, 12), st.lists(st.integers(0, 7), max_size=8))
def test_a_step_survives_the_wire(batch, num_parts, asked):
    arrived = unpack_step(pack_step(StepOrder(batch, num_parts, asked)))
    assert (arrived.num_parts, arrived.asked) == (num_parts, asked)
    for name in ForwardBatch.__dataclass_fields__:
        sent, got = getattr(batch, name), getattr(arrived.batch, name)
        assert np.array_equal(sent, got) and sent.dtype.kind == got.dtype.kind


@given(st.lists(st.lists(st.integers(1, 2**31 - 1), max_size=9), min_size=1, max_size=5))
def test_lists_of_pages_survive_the_wire(lists):
    assert [pages.tolist() for pages in unpack_lists(pack_lists(lists))] == lists


def decode_batch(num_rows: int) -> ForwardBatch:
    ones = np.ones(num_rows, np.int32)
    return ForwardBatch(
        ones, ones, np.arange(num_rows + 1, dtype=np.int32), ones, np.ones((num_rows, 1), np.int32)
    )


def prompt(num_tokens: int) -> ForwardBatch:
    bounds = np.array([0, num_tokens], np.int32)
    tokens = np.arange(num_tokens)
    return ForwardBatch(tokens, tokens, bounds, bounds[1:], np.ones((1, 64), np.int32))


@pytest.mark.parametrize(
    ("batch", "num_stages", "num_open", "count"),
    [
        (decode_batch(64), 1, 0, 1),
        (decode_batch(64), 3, 0, 3),
        (decode_batch(64), 3, 1, 2),
        (decode_batch(64), 3, 2, 1),
        (decode_batch(2), 3, 0, 2),
        (prompt(40), 2, 0, 2),
        (prompt(160), 2, 0, 2),
        (prompt(700), 2, 0, 5),
        (prompt(4000), 2, 0, 8),
        (prompt(4000), 2, 1, 1),
        (prompt(4000), 3, 1, 12),
    ],
)
def test_stages_are_kept_full(batch, num_stages, num_open, count):
    assert num_micro_batches(batch, num_stages, num_open) == count

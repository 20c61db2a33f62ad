"""Which graph a batch takes, and what its padding reads and writes."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from daskserve.workers.cuda import graphs
from daskserve.workers.cuda.graphs import bucket_for, bucket_sizes, padded_fields
from daskserve.workers.cuda.step import tiles, to_device
from daskserve.workers.forward import ForwardBatch
from daskserve.workers.kv_pool import SCRATCH_PAGE

BLOCK = 4


def decode_batch(contexts: list[int]) -> ForwardBatch:
    contexts = np.array(contexts, np.int32)
    width = -(-int(contexts.max()) // BLOCK) + 2
    table = 1 + np.arange(len(contexts) * width, dtype=np.int32).reshape(len(contexts), width)
    return ForwardBatch(
        token_ids=np.arange(10, 10 + len(contexts)),
        positions=contexts.astype(np.int64) - 1,
        query_start=np.arange(len(contexts) + 1, dtype=np.int32),
        context_tokens=contexts,
        page_table=table,
    )


def test_sizes():
    assert bucket_sizes(1) == (1,)
    assert bucket_sizes(6) == (1, 2, 4, 6)
    assert bucket_sizes(64) == (1, 2, 4, 8, 16, 32, 48, 64)
    assert bucket_sizes(100)[-3:] == (80, 96, 100)


@given(st.integers(1, 600), st.integers(1, 600))
def test_the_bucket_is_the_smallest_that_holds_the_batch(max_rows, rows):
    sizes = bucket_sizes(max_rows)
    found = bucket_for(rows, sizes)
    assert (found is None) == (rows > max_rows)
    if found is not None:
        assert found >= rows and all(size < rows for size in sizes if size < found)
        assert found <= max(2 * rows, rows + 15)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=9), st.integers(0, 5))
def test_padding_touches_the_scratch_page_only(contexts, extra):
    batch = decode_batch(contexts)
    rows, size = len(contexts), len(contexts) + extra
    fields, table = padded_fields(batch, BLOCK, size)
    assert (fields[graphs.WRITE_PAGE, rows:] == SCRATCH_PAGE).all()
    assert (table[rows:] == SCRATCH_PAGE).all() and (fields[graphs.CONTEXT, rows:] == 1).all()
    for row, context in enumerate(contexts):
        page, slot = divmod(context - 1, BLOCK)
        assert fields[graphs.WRITE_PAGE, row] == batch.page_table[row, page]
        assert fields[graphs.WRITE_SLOT, row] == slot
        assert (table[row, : page + 1] == batch.page_table[row, : page + 1]).all()


def test_a_padded_step_computes_what_the_plain_one_does(load_on_device, family_dir):
    """Over the static tensors of a graph, without the recording itself, which needs a GPU."""
    runner = load_on_device(family_dir("llama"), block_size=BLOCK)
    contexts = [7, 3, 12]
    pool = runner.new_pool(40, BLOCK)
    runner.bind(pool.pages)
    pool.pages.normal_(generator=torch.Generator().manual_seed(0))
    batch = decode_batch(contexts)
    before = pool.pages.clone()
    plain = runner.forward(batch)
    pool.pages.copy_(before)
    recorder = graphs.DecodeGraphs(runner._run, runner.attention, pool.pages, 8, 256)
    fields, table = padded_fields(batch, BLOCK, 4)
    wide = torch.zeros(4, 30, dtype=torch.int32)
    wide[:, : table.shape[1]] = torch.from_numpy(table)
    rows = torch.arange(5, dtype=torch.int32)
    step = graphs.static_step(recorder, torch.from_numpy(fields), wide, rows)
    with torch.inference_mode():
        padded = runner._run(step)
    assert torch.allclose(padded[:3], plain, atol=1e-5)
    assert not before[1:].equal(pool.pages[1:])


@given(st.lists(st.integers(1, 50), min_size=1, max_size=6), st.integers(1, 20))
def test_tiles_cover_every_token_once_and_cross_no_row(lengths, tile_tokens):
    start = np.cumsum([0, *lengths]).astype(np.int32)
    rows, firsts = tiles(start, tile_tokens)
    covered = []
    for row, first in zip(rows, firsts, strict=True):
        assert start[row] <= first < start[row + 1]
        covered += range(first, min(first + tile_tokens, start[row + 1]))
    assert covered == list(range(start[-1]))


def test_a_step_arrives_as_the_batch_says(load_on_device, family_dir):
    runner = load_on_device(family_dir("llama"), block_size=BLOCK)
    pages = runner.new_pool(20, BLOCK).pages
    runner.bind(pages)
    batch = ForwardBatch(
        token_ids=np.array([5, 6, 7, 8, 9]),
        positions=np.array([3, 4, 5, 0, 1]),
        query_start=np.array([0, 3, 5], np.int32),
        context_tokens=np.array([6, 2], np.int32),
        page_table=np.array([[11, 4], [9, 0]], np.int32),
    )
    step = to_device(batch, pages, runner.attention, torch.device("cpu"))
    assert step.write_pages.tolist() == [11, 4, 4, 9, 9]
    assert step.write_slots.tolist() == [3, 0, 1, 0, 1]
    assert step.last_tokens.tolist() == [2, 4]
    assert (step.max_query, step.max_context, step.is_fresh) == (3, 6, False)
    assert step.query_start.dtype == step.page_table.dtype == torch.int32

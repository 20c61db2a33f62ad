"""Compiled attention equals the textbook, whatever the batch, the pages and the sizes."""

from __future__ import annotations

import functools

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from daskserve.workers.forward import ForwardBatch, LayerFacts
from daskserve.workers.layer_attention import LayerAttention, can_attend

LAYERS = 2
SIZES = [(1, 1, 32), (3, 1, 64), (6, 2, 96), (9, 3, 64), (16, 1, 32), (10, 2, 128)]


@functools.cache
def attention(size: int, window: int | None, dtype: torch.dtype) -> LayerAttention:
    facts = [LayerFacts(*SIZES[size], scaling=0.2, window=window, is_plain=True)] * LAYERS
    assert can_attend(facts)
    return LayerAttention(facts, dtype, num_threads=1)


def textbook(query, keys, values, window: int | None) -> torch.Tensor:
    """``[T, heads, D]`` for queries ``[heads, T, D]`` at the end of ``[kv_heads, context, D]``."""
    groups = query.shape[0] // keys.shape[0]
    scores = query @ keys.repeat_interleave(groups, 0).transpose(1, 2) * 0.2
    context = keys.shape[1]
    at, other = torch.arange(context - query.shape[1], context)[:, None], torch.arange(context)
    visible = (other <= at) & (at - other < (window or context))
    weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
    return (weights @ values.repeat_interleave(groups, 0)).transpose(0, 1)


rows = st.lists(
    st.tuples(st.integers(0, 150), st.one_of(st.just(1), st.integers(1, 70))),
    min_size=1,
    max_size=5,
)


@settings(deadline=None, max_examples=60)
@given(
    rows=rows,
    size=st.integers(0, len(SIZES) - 1),
    window=st.sampled_from([None, 5, 40]),
    block_size=st.sampled_from([16, 32]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 2**32),
)
def test_equals_the_textbook(rows, size, window, block_size, dtype, seed) -> None:
    num_heads, num_kv_heads, head_dim = SIZES[size]
    generator = torch.Generator().manual_seed(seed)
    contexts = [cached + new for cached, new in rows]
    pages_each = max(-(-context // block_size) for context in contexts)
    order = torch.randperm(len(rows) * pages_each, generator=generator) + 1
    table = order.view(len(rows), pages_each).int().numpy()
    pages = torch.full(
        (len(order) + 1, LAYERS, 2, num_kv_heads, block_size, head_dim), torch.nan, dtype=dtype
    )
    kv = [
        torch.randn(2, num_kv_heads, context, head_dim, generator=generator).to(dtype)
        for context in contexts
    ]
    for (cached, _), row_table, row_kv in zip(rows, table, kv, strict=True):
        for position in range(cached):
            page = pages[row_table[position // block_size], 1]
            page[:, :, position % block_size] = row_kv[:, :, position]
    starts = np.cumsum([0, *(new for _, new in rows)], dtype=np.int32)
    batch = ForwardBatch(
        token_ids=np.zeros(starts[-1], dtype=np.int64),
        positions=np.concatenate([np.arange(c, c + n) for c, n in rows]),
        query_start=starts,
        context_tokens=np.array(contexts, dtype=np.int32),
        page_table=table,
    )
    query = torch.randn(num_heads, int(starts[-1]), head_dim, generator=generator).to(dtype)
    new = torch.cat([x[:, :, cached:] for (cached, _), x in zip(rows, kv, strict=True)], dim=2)
    kernels = attention(size, window, dtype)
    kernels.begin(batch, pages)
    got = kernels.attend(1, query, new[0], new[1])
    for row, (start, end) in enumerate(zip(starts, starts[1:], strict=False)):
        expected = textbook(
            query[:, start:end].double(), kv[row][0].double(), kv[row][1].double(), window
        )
        tolerance = 1e-5 if dtype == torch.float32 else 0.03
        assert (got[start:end] - expected).abs().max() < tolerance
    for row_table, row_kv, context in zip(table, kv, contexts, strict=True):
        stored = pages[row_table, 1].permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :context]
        assert torch.equal(stored, row_kv)
    assert pages[:, 0].isnan().all()

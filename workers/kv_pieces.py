"""KV between instances of unlike shapes: the layers and heads that one rank needs of another.

A piece is contiguous, ``[pages, layers, 2, heads, block_size, head_dim]``, so that it travels like
whole pages do; only its two ends copy in strides.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from daskserve.core.shards import Shard
from daskserve.errors import KVUnavailable
from daskserve.workers.kv_digest import words_digest
from daskserve.workers.kv_pool import KVPool

_CHUNK_BYTES = 2**21  # stays in the cache between its copy and the socket


def piece_bytes(pool: KVPool, num_pages: int, shard: Shard) -> int:
    """Bytes of the layers and heads of ``shard`` in so many pages."""
    words = pool.slices.shape[-1]
    return num_pages * shard.num_layers * 2 * shard.num_heads * words * pool.slices.itemsize


def read_chunks(pool: KVPool, page_ids: Sequence[int], shard: Shard) -> Iterator[memoryview]:
    """The bytes of `read_piece`, some pages at a time: they travel while others are read."""
    step = _pages_per_chunk(pool, shard)
    for start in range(0, len(page_ids), step):
        yield read_piece(pool, page_ids[start : start + step], shard)


def write_chunks(pool: KVPool, page_ids: Sequence[int], shard: Shard) -> Iterator[memoryview]:
    """Room for the bytes of `read_chunks`: what is filled is written when the next is asked for."""
    step = _pages_per_chunk(pool, shard)
    room = memoryview(bytearray(piece_bytes(pool, min(step, len(page_ids)), shard)))
    for start in range(0, len(page_ids), step):
        pages = page_ids[start : start + step]
        chunk = room[: piece_bytes(pool, len(pages), shard)]
        yield chunk
        write_piece(pool, pages, shard, chunk)


def read_piece(pool: KVPool, page_ids: Sequence[int], shard: Shard) -> memoryview:
    """A contiguous copy of the bytes of ``shard``, which is part of the pool's."""
    layers, heads = shard.within(pool.shard)
    piece = pool.slices[:, layers, :, heads][np.asarray(page_ids, dtype=np.int64)]
    return memoryview(np.ascontiguousarray(piece).view(np.uint8).reshape(-1))


def piece_digest(pool: KVPool, data: memoryview, shard: Shard) -> int:
    """Digest of a piece as it travels; that of the pages that it was read from."""
    return words_digest(_as_words(pool, data, shard), shard)


def write_piece(pool: KVPool, page_ids: Sequence[int], shard: Shard, data: memoryview) -> None:
    """Put a piece into its place in these pages (KVUnavailable if it is of another size)."""
    expected = piece_bytes(pool, len(page_ids), shard)
    if data.nbytes != expected:
        raise KVUnavailable(f"a piece of KV has {data.nbytes} bytes, {expected} are needed")
    layers, heads = shard.within(pool.shard)
    target = pool.slices[:, layers, :, heads]
    target[np.asarray(page_ids, dtype=np.int64)] = _as_words(pool, data, shard)


def _pages_per_chunk(pool: KVPool, shard: Shard) -> int:
    return max(_CHUNK_BYTES // piece_bytes(pool, 1, shard), 1)


def _as_words(pool: KVPool, data: memoryview, shard: Shard) -> np.ndarray:
    shape = (-1, shard.num_layers, 2, shard.num_heads, pool.slices.shape[-1])
    return np.frombuffer(data, dtype=pool.slices.dtype).reshape(shape)

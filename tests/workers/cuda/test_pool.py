"""Pages on a device: the same digests, and the same bytes on the way out and in."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from daskserve.core.kv import KVFrame
from daskserve.core.shards import Shard
from daskserve.errors import KVUnavailable
from daskserve.workers.cuda.frames import PageRuns
from daskserve.workers.cuda.pool import DevicePool
from daskserve.workers.forward import ModelShape
from daskserve.workers.kv_digest import slice_digests
from daskserve.workers.kv_pieces import read_piece, write_piece
from daskserve.workers.kv_pool import AccountingError, KVPool

CPU = torch.device("cpu")
SHAPE = ModelShape(3, 4, 8, 100, 64, frozenset())
PAGES = [5, 6, 7, 2, 9, 1]


def pools(dtype: torch.dtype) -> tuple[KVPool, DevicePool]:
    host = KVPool(SHAPE, dtype, 9, 16)
    host.pages.copy_(torch.randn(host.pages.shape, generator=torch.Generator().manual_seed(3)))
    device = DevicePool(SHAPE, dtype, 9, 16, CPU)
    device.pages.copy_(host.pages)
    return host, device


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shard", [None, Shard(1, 2, 1, 3), Shard(2, 1, 0, 1)])
def test_digests_are_those_of_the_host(dtype, shard):
    host, device = pools(dtype)
    for pages in (PAGES, PAGES[:1], PAGES[::-1]):
        expected = slice_digests(host, pages, shard)
        assert np.array_equal(slice_digests(device, pages, shard), expected)
    device.pages.view(torch.uint8)[7, 2, 1, 0, 3, 3] ^= 1
    changed = slice_digests(device, PAGES) != slice_digests(host, PAGES)
    assert np.argwhere(changed).tolist() == [[2, 0]]


def test_digests_do_not_depend_on_how_many_pages_are_summed_at_once(monkeypatch):
    host, device = pools(torch.float32)
    monkeypatch.setattr("daskserve.workers.cuda.digest._CHUNK_BYTES", 1)
    assert np.array_equal(slice_digests(device, PAGES), slice_digests(host, PAGES))


@pytest.mark.parametrize("chunk_bytes", [1, 3 * 6144, 2**22])
def test_what_goes_out_comes_in(chunk_bytes, monkeypatch):
    monkeypatch.setattr("daskserve.workers.cuda.pool._CHUNK_BYTES", chunk_bytes)
    host, source = pools(torch.float32)
    target = DevicePool(SHAPE, torch.float32, 9, 16, CPU)
    going = source.outgoing(PAGES)
    sent = b"".join(bytes(chunk) for chunk in going.chunks)
    assert sent == b"".join(host.page_views(PAGES)) and len(sent) == going.num_bytes
    there = [1, 3, 4, 5, 9, 8]
    start = 0
    for chunk in target.incoming(there).chunks:
        chunk[:] = sent[start : start + len(chunk)]
        start += len(chunk)
    assert start == len(sent)
    assert torch.equal(target.pages[there], source.pages[PAGES])
    assert not target.pages[[0, 2, 6, 7]].any()


def test_a_way_in_that_is_given_up_leaves_nothing_writing():
    _, source = pools(torch.float32)
    way = source.incoming(PAGES)
    next(way.chunks)
    way.chunks.close()
    assert list(way.chunks) == []


def test_pages_outside_the_pool_are_refused():
    _, device = pools(torch.float32)
    for pages in ([0], [8, 9, 10]):
        with pytest.raises(AccountingError, match="outside the pool"):
            device.outgoing(pages)


def test_pieces_of_other_shapes_move_between_host_and_device():
    host, device = pools(torch.bfloat16)
    shard = Shard(1, 1, 2, 2)
    piece = read_piece(device, PAGES, shard)
    assert bytes(piece) == bytes(read_piece(host, PAGES, shard))
    device.pages.zero_()
    write_piece(device, PAGES, shard, memoryview(bytes(piece)))
    assert torch.equal(device.pages[PAGES][:, 1:2, :, 2:], host.pages[PAGES][:, 1:2, :, 2:])
    assert int(device.pages.count_nonzero()) <= piece.nbytes // 2


def test_frames_fill_pages_however_they_are_cut():
    _, source = pools(torch.float32)
    target = DevicePool(SHAPE, torch.float32, 9, 16, CPU)
    there = [3, 4, 9, 8, 1, 6]
    runs = PageRuns(target._raw, there, target.copies)
    sent = torch.cat([frame.data for frame in PageRuns(source._raw, PAGES, source.copies).frames()])
    for piece in sent.split(10_000):
        runs._fill(piece)
    assert torch.equal(target.pages[there], source.pages[PAGES])
    with pytest.raises(KVUnavailable, match="more KV than"):
        runs._fill(sent[:1])
    with pytest.raises(KVUnavailable, match="not in device memory"):
        runs.fill(KVFrame(sent))

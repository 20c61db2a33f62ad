"""A decode instance of any shape goes on from the KV of a prefill instance of any shape."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from daskserve.core.instance import Role
from daskserve.core.placement import Parallelism
from daskserve.core.shards import Shard, ShardMap
from daskserve.errors import KVUnavailable
from daskserve.workers import kv_pieces
from daskserve.workers.forward import ModelShape
from daskserve.workers.kv_digest import slice_digests, summed
from daskserve.workers.kv_pieces import (
    piece_bytes,
    read_chunks,
    read_piece,
    write_chunks,
    write_piece,
)
from daskserve.workers.kv_pool import KVPool

from .test_tokens import MODELS, SHAPES, generate

SHAPE = ModelShape(4, 4, 8, 100, 256, frozenset())


def filled_pool(shard: Shard | None = None) -> KVPool:
    pool = KVPool(SHAPE, torch.float32, 6, 4, shard)
    torch.manual_seed(0)
    whole = torch.randn(7, 4, 2, 4, 4, 8)
    layers, heads = pool.shard.within(SHAPE.whole)
    pool.pages[:] = whole[:, layers, :, heads]
    return pool


def shards_of(tp: int, pp: int) -> list[Shard]:
    shards = ShardMap(Parallelism(tp, pp), 4, 4, 4)
    return [shards.of_rank(rank) for rank in range(shards.num_ranks)]


@pytest.mark.parametrize("shape", [(1, 1), (2, 1), (1, 3), (4, 2)], ids=str)
def test_digests_do_not_depend_on_the_shape(shape):
    pages = [3, 1, 5]
    whole = slice_digests(filled_pool(), pages)
    for shard in shards_of(*shape):
        digests = slice_digests(filled_pool(shard), pages)
        assert np.array_equal(digests, whole[shard.within(SHAPE.whole)])
        assert summed(slice_digests(filled_pool(), pages, shard)) == summed(digests)


def test_heads_and_layers_that_changed_places_are_noticed():
    pool = filled_pool()
    before = summed(slice_digests(pool, [1, 2]))
    for axis in (1, 3):
        other = filled_pool()
        other.pages[:] = pool.pages.roll(1, axis)
        assert summed(slice_digests(other, [1, 2])) != before


@pytest.mark.parametrize("shapes", [*itertools.product([(1, 1), (2, 2), (4, 1), (1, 3)], repeat=2)])
def test_pieces_carry_every_byte_to_its_place(shapes):
    (source_tp, source_pp), target = shapes
    source_map = ShardMap(Parallelism(source_tp, source_pp), 4, 4, 4)
    sources = [filled_pool(shard) for shard in shards_of(source_tp, source_pp)]
    for shard in shards_of(*target):
        pool = KVPool(SHAPE, torch.float32, 6, 4, shard)
        for piece in source_map.pieces_for(shard):
            data = read_piece(sources[piece.rank], [4, 2], piece.shard)
            assert data.nbytes == piece_bytes(pool, 2, piece.shard)
            write_piece(pool, [1, 6], piece.shard, data)
        assert torch.equal(pool.pages[[1, 6]], filled_pool(shard).pages[[4, 2]])
        assert not pool.pages[[0, 2, 3, 4, 5]].any()


@pytest.mark.parametrize("chunk_bytes", [1, 9000, 2**20])
def test_chunks_are_the_piece(chunk_bytes, monkeypatch):
    monkeypatch.setattr(kv_pieces, "_CHUNK_BYTES", chunk_bytes)
    source, target = filled_pool(), KVPool(SHAPE, torch.float32, 6, 4)
    shard, pages = Shard(1, 2, 1, 2), [4, 2, 5]
    chunks = read_chunks(source, pages, shard)
    for room in write_chunks(target, [1, 6, 3], shard):
        room[:] = next(chunks)
    assert next(chunks, None) is None
    layers, heads = shard.within(SHAPE.whole)
    expected = torch.zeros_like(target.pages)
    expected[[1, 6, 3], layers, :, heads] = source.pages[pages, layers, :, heads]
    assert torch.equal(target.pages, expected)


def test_a_piece_of_another_size_is_refused():
    pool = filled_pool()
    data = read_piece(pool, [1], SHAPE.whole)
    with pytest.raises(KVUnavailable, match="a piece of KV has 4096 bytes, 8192 are needed"):
        write_piece(pool, [1, 2], SHAPE.whole, data)


class Resharding:
    """Copies the KV between two instances as their ranks would do it themselves."""

    def __init__(self, rig_type, source, target):
        self.source, self.target = source, target
        outer = self

        class ReshardingRig(rig_type):
            def _copy(self, prefill, decode, handle, reserved):
                outer.copy(prefill, handle, reserved, self.now)
                prefill.release(handle.request_id, handle.secret)

        self.rig_type = ReshardingRig
        self.num_copied = 0

    def copy(self, prefill, handle, reserved, now) -> None:
        shape = self.source.runner.shape
        held = ShardMap(
            Parallelism(handle.tp, handle.pp),
            shape.num_layers,
            shape.num_kv_heads,
            shape.num_kv_heads,
            handle.stage_layers,
        )
        total = 0
        for rank, pool in enumerate(self.target.pools()):
            pieces = []
            for piece in held.pieces_for(pool.shard):
                pages, digest = prefill.holding.pin_piece(handle, piece.shard, now)
                source = self.source.pools()[piece.rank]
                assert summed(slice_digests(source, pages, piece.shard)) == digest
                pieces.append((piece.shard, read_piece(source, pages, piece.shard)))
                total += digest
            if rank:
                self.target.followers[rank].keep(reserved.owner, pieces)
            else:
                for shard, data in pieces:
                    write_piece(pool, reserved.pages, shard, data)
        assert total % 2**64 == handle.digest
        self.num_copied += 1


@pytest.mark.parametrize("target", SHAPES, ids=lambda shape: f"to{shape}")
@pytest.mark.parametrize("source", SHAPES, ids=lambda shape: f"from{shape}")
@pytest.mark.parametrize("model", MODELS)
def test_decode_goes_on_from_any_prefill(model, source, target, ranks_of, rig_type, make_request):
    prefill, decode = ranks_of(model, *source), ranks_of(model, *target, number=1)
    resharding = Resharding(rig_type, prefill, decode)
    rig = resharding.rig_type(
        prefill.engine(Role.PREFILL, prefill_budget_tokens=64), decode.engine(Role.DECODE)
    )
    requests = [make_request(f"k{n}", n, max_tokens=10) for n in (1, 16, 50)]
    for request in requests:
        rig.submit(request)
    outcomes = rig.run()
    for request in requests:
        answer = outcomes[request.request_id]
        assert answer.token_ids == generate(model, request.prompt_token_ids, 10)
        assert answer.timeline.num_recomputes == 0
    assert resharding.num_copied == 3

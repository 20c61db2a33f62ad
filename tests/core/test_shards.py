from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daskserve.core.placement import Parallelism
from daskserve.core.shards import Shard, ShardMap, balanced_layers
from daskserve.errors import InvalidParameter

degrees = st.sampled_from([1, 2, 3, 4, 6])


def cells(shard: Shard) -> set[tuple[int, int]]:
    return {(layer, head) for layer in shard.layers for head in shard.heads}


@st.composite
def maps(draw, count: int = 1) -> list[ShardMap]:
    num_layers = draw(st.integers(6, 40))
    num_kv_heads = 12 * draw(st.integers(1, 2))
    num_heads = num_kv_heads * draw(st.integers(1, 4))
    shapes = [Parallelism(draw(degrees), draw(degrees)) for _ in range(count)]
    extra = draw(st.sampled_from([0.0, 0.5, 3.3, 30.0]))
    return [
        ShardMap(
            shape,
            num_layers,
            num_heads,
            num_kv_heads,
            balanced_layers(num_layers, shape.pp, extra),
        )
        for shape in shapes
    ]


@given(maps())
def test_every_layer_and_head_belongs_to_one_rank(given_maps):
    [shards] = given_maps
    held = [cell for rank in range(shards.num_ranks) for cell in cells(shards.of_rank(rank))]
    assert len(held) == len(set(held)) == shards.num_layers * shards.num_kv_heads


@given(st.integers(6, 60), st.integers(1, 6), st.floats(0, 40))
def test_no_other_way_to_share_the_layers_out_makes_the_longest_stage_shorter(
    num_layers, num_stages, extra
):
    sizes = balanced_layers(num_layers, num_stages, extra)
    assert len(sizes) == num_stages and sum(sizes) == num_layers
    assert max(sizes) == sizes[0] and min(sizes) >= 1
    if num_stages > 1:
        longest = max(sizes[0], sizes[-1] + extra)
        for last in range(1, num_layers - num_stages + 2):
            others = -(-(num_layers - last) // (num_stages - 1))
            assert longest <= max(others, last + extra)
    if extra == 0:
        assert max(sizes) - min(sizes) <= 1


@given(maps())
def test_stages_are_in_order(given_maps):
    [shards] = given_maps
    heads = [stage * shards.parallelism.tp for stage in range(shards.parallelism.pp)]
    layers = [layer for rank in heads for layer in shards.of_rank(rank).layers]
    assert layers == [*range(shards.num_layers)]


@given(maps(count=2), st.data())
def test_pieces_cover_a_rank_of_another_shape_once_with_one_per_source(given_maps, data):
    source, target = given_maps
    shard = target.of_rank(data.draw(st.integers(0, target.num_ranks - 1)))
    pieces = source.pieces_for(shard)
    held = [cell for piece in pieces for cell in cells(piece.shard)]
    assert len(held) == len(set(held))
    assert set(held) == cells(shard)
    assert len({piece.rank for piece in pieces}) == len(pieces)
    for piece in pieces:
        assert cells(piece.shard) <= cells(source.of_rank(piece.rank))


@given(maps())
def test_equal_shapes_exchange_whole_ranks(given_maps):
    [shards] = given_maps
    for rank in range(shards.num_ranks):
        [piece] = shards.pieces_for(shards.of_rank(rank))
        assert (piece.rank, piece.shard) == (rank, shards.of_rank(rank))


@pytest.mark.parametrize(
    ("shape", "sizes", "message"),
    [
        (Parallelism(2, 1), (30, 9, 3), "tp=2 must divide the model's 9 attention heads"),
        (Parallelism(8, 1), (30, 32, 4), "tp=8 must divide the model's 4 KV heads"),
        (Parallelism(1, 3), (2, 8, 4), "pp=3 must be at most the model's 2 layers"),
    ],
)
def test_what_cannot_be_shared_out_is_refused_with_its_numbers(shape, sizes, message):
    with pytest.raises(InvalidParameter) as caught:
        ShardMap(shape, *sizes)
    assert message in str(caught.value)


@pytest.mark.parametrize("sizes", [(3, 3), (4,), (4, 0), (2, 1, 1)])
def test_layers_that_are_not_those_of_the_model_are_refused(sizes):
    with pytest.raises(InvalidParameter, match="must be 2 numbers from 1 on with a sum of 4"):
        ShardMap(Parallelism(1, 2), 4, 8, 4, sizes)


def test_a_rank_that_does_not_exist_is_refused():
    with pytest.raises(InvalidParameter, match=r"rank=4 must be 0\.\.3"):
        ShardMap(Parallelism(2, 2), 4, 8, 4).of_rank(4)

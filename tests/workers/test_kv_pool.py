"""Page accounting: one owner per page, whatever the order of calls; bytes of pages."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from daskserve.errors import ConfigError
from daskserve.workers.forward import ModelShape
from daskserve.workers.kv_digest import kv_digest
from daskserve.workers.kv_pool import AccountingError, KVPool, kv_layout

SHAPE = ModelShape(2, 3, 4, 100, 256, frozenset())
BLOCKS = 12


def make_pool(num_blocks: int = BLOCKS, dtype: torch.dtype = torch.float32) -> KVPool:
    return KVPool(SHAPE, dtype, num_blocks, block_size=4)


class PoolLaws(RuleBasedStateMachine):
    """Any sequence of allocate, extend and free against the obvious model."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = make_pool()
        self.owned: dict[int, list[int]] = {}
        self.next_owner = 0

    @rule(count=st.integers(1, BLOCKS + 1))
    def allocate(self, count: int) -> None:
        self.next_owner += 1
        free = BLOCKS - sum(map(len, self.owned.values()))
        pages = self.pool.allocate(self.next_owner, count)
        assert (pages is None) == (count > free)
        if pages is not None:
            self.owned[self.next_owner] = list(pages)
            assert len(pages) == count

    @precondition(lambda self: self.owned)
    @rule(data=st.data())
    def extend(self, data: st.DataObject) -> None:
        owner = data.draw(st.sampled_from(sorted(self.owned)))
        free = BLOCKS - sum(map(len, self.owned.values()))
        page = self.pool.extend(owner)
        assert (page is None) == (free == 0)
        if page is not None:
            self.owned[owner].append(page)

    @precondition(lambda self: self.owned)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        owner = data.draw(st.sampled_from(sorted(self.owned)))
        self.pool.free(owner)
        del self.owned[owner]
        with pytest.raises(AccountingError):
            self.pool.free(owner)

    @invariant()
    def every_page_has_at_most_one_owner(self) -> None:
        pages = [page for owned in self.owned.values() for page in owned]
        assert len(pages) == len(set(pages)) == self.pool.num_used
        assert all(1 <= page <= BLOCKS for page in pages)
        assert self.pool.num_free + self.pool.num_used == BLOCKS
        for owner, owned in self.owned.items():
            assert self.pool.pages_of(owner) == owned


TestPoolLaws = PoolLaws.TestCase


def test_strangers_and_second_allocations_are_refused() -> None:
    pool = make_pool()
    pool.allocate("a", 2)
    for call in (lambda: pool.free("b"), lambda: pool.extend("b"), lambda: pool.allocate("a", 1)):
        with pytest.raises(AccountingError):
            call()
    assert pool.num_used == 2


def test_pages_are_consecutive_while_a_run_is_free() -> None:
    pool = make_pool()
    first, second = pool.allocate("a", 3), pool.allocate("b", 4)
    assert (first, second) == ([1, 2, 3], [4, 5, 6, 7])
    pool.free("a")
    assert pool.allocate("c", 4) == [8, 9, 10, 11]
    assert sorted(pool.allocate("d", 4)) == [1, 2, 3, 12], "the rest is used when no run is left"


def test_views_of_consecutive_pages_are_merged() -> None:
    pool = make_pool()
    views = pool.page_views([2, 3, 4, 9, 7, 8])
    page = SHAPE.num_layers * 2 * SHAPE.num_kv_heads * 4 * SHAPE.head_dim * 4
    assert [view.nbytes for view in views] == [3 * page, page, 2 * page]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_written_through_views_are_the_pages(dtype: torch.dtype) -> None:
    source, target = make_pool(dtype=dtype), make_pool(dtype=dtype)
    source.pages[1:] = torch.randn(source.pages[1:].shape).to(dtype)
    data = b"".join(source.page_views([5, 2, 3]))
    offset = 0
    for view in target.page_views([1, 2, 9]):
        view[:] = data[offset : offset + view.nbytes]
        offset += view.nbytes
    assert torch.equal(target.pages[[1, 2, 9]], source.pages[[5, 2, 3]])
    assert kv_digest(target, [1, 2, 9]) == kv_digest(source, [5, 2, 3])


@pytest.mark.parametrize("pages", [[0], [BLOCKS + 1], [-1]])
def test_views_outside_the_pool_are_refused(pages: list[int]) -> None:
    with pytest.raises(AccountingError):
        make_pool().page_views(pages)


@given(
    flip=st.tuples(st.integers(0, 2), st.integers(0, 767), st.integers(1, 255)),
    value=st.sampled_from([0.0, 1.0, -1.0]),
)
def test_one_wrong_byte_changes_the_digest(flip: tuple[int, int, int], value: float) -> None:
    pool = make_pool()
    pool.pages[1:4] = value
    before = kv_digest(pool, [1, 2, 3])
    page, byte, bits = flip
    view = pool.page_views([page + 1])[0]
    view[byte] ^= bits
    assert kv_digest(pool, [1, 2, 3]) != before


@given(st.permutations([1, 2, 3, 4]), st.floats(width=32, allow_nan=False))
def test_pages_in_another_order_change_the_digest(order: list[int], value: float) -> None:
    pool = make_pool()
    pool.pages[1:5] = value
    pool.pages[1, 0, 0, 0, 0, 0] = 1.0  # pages that differ in single elements only
    pool.pages[2, 0, 0, 0, 0, 1] = 2.0
    pool.pages[3, 0, 0, 0, 0, 0] = -1.0
    same_content = [pool.pages[page].flatten().tolist() for page in (1, 2, 3, 4)] == [
        pool.pages[page].flatten().tolist() for page in order
    ]
    same_digest = kv_digest(pool, order) == kv_digest(pool, [1, 2, 3, 4])
    assert same_digest == same_content


def test_layout_names_all_that_must_agree() -> None:
    base = kv_layout("m", SHAPE, torch.float32, 16)
    assert base == kv_layout("m", SHAPE, torch.float32, 16)
    others = {
        kv_layout("n", SHAPE, torch.float32, 16),
        kv_layout("m", SHAPE, torch.bfloat16, 16),
        kv_layout("m", SHAPE, torch.float32, 8),
        kv_layout("m", ModelShape(2, 3, 8, 100, 256, frozenset()), torch.float32, 16),
    }
    assert len(others | {base}) == 5


def test_blocks_that_cannot_be_digested_are_refused() -> None:
    odd = ModelShape(2, 3, 1, 100, 256, frozenset())
    with pytest.raises(ConfigError, match="block_size=3 gives 12 bytes"):
        KVPool(odd, torch.float32, BLOCKS, block_size=3)

"""Whatever happens to a rank, the others learn it in time and say who it was."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
import torch

from daskserve.core.instance import EngineConfig, Role
from daskserve.core.placement import Parallelism
from daskserve.errors import InstanceLost
from daskserve.workers.forward import ForwardBatch
from daskserve.workers.parallel import group
from daskserve.workers.parallel.group import RankGroup, join_group, open_group
from daskserve.workers.parallel.wire import Order, OrderLine

from .conftest import HOST, launch


@pytest.fixture(autouse=True)
def quick_last_words(monkeypatch):
    monkeypatch.setattr(group, "_LAST_WORDS_S", 0.4)


CONFIG = EngineConfig(model="tiny-random-llama", dtype="float32", num_threads=1, rank_timeout_s=1.5)


def groups_of(shape: Parallelism, timeout_s: float = 1.0) -> list[RankGroup]:
    meeting, store = open_group(shape, HOST, 5)
    groups: dict[int, RankGroup] = {}

    def join(rank: int) -> None:
        own = store if rank == 0 else join_group(meeting, rank, 5)
        groups[rank] = RankGroup(own, shape, rank, host=HOST, timeout_s=timeout_s, assembly_s=5)

    on_all(shape.num_gpus, join)
    return [groups[rank] for rank in range(shape.num_gpus)]


def on_all(count: int, work) -> list[BaseException | None]:
    """Call ``work(rank)`` on a thread per rank; what each raised."""
    errors: list[BaseException | None] = [None] * count

    def guarded(rank: int) -> None:
        try:
            work(rank)
        except BaseException as error:
            errors[rank] = error

    threads = [threading.Thread(target=guarded, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    return errors


def ask_all(group: RankGroup) -> None:
    """Every rank hears from every other."""
    others = [rank for rank in range(group.num_ranks) if rank != group.rank]
    for rank in others:
        group.post(torch.zeros(1), rank, 7)
    for rank in others:
        group.receive(torch.zeros(1), rank, 7)()


@pytest.mark.parametrize("size", [0, 5, 4094, 4095, 9000])
def test_orders_of_any_length_arrive(size):
    groups = groups_of(Parallelism(1, 3))
    numbers = np.arange(size, dtype=np.int32)
    taken = {}

    def work(rank: int) -> None:
        line = OrderLine(groups[rank])
        if rank == 0:
            line.give(Order.STEP, numbers)
            line.give(Order.BEAT)
            line.drain()
        else:
            taken[rank] = [line.take(), line.take()]

    assert on_all(3, work) == [None] * 3
    for rank in (1, 2):
        (first, got), (second, nothing) = taken[rank]
        assert (first, second) == (Order.STEP, Order.BEAT)
        assert np.array_equal(got, numbers) and nothing.size == 0
    for each in groups:
        each.close()


@pytest.mark.parametrize("lost", [0, 1, 3])
def test_a_rank_that_is_gone_is_named_by_all(lost):
    groups = groups_of(Parallelism(2, 2))

    def work(rank: int) -> None:
        if rank == lost:
            groups[rank].close()
        else:
            ask_all(groups[rank])
            ask_all(groups[rank])

    errors = on_all(4, work)
    said = [str(error) for rank, error in enumerate(errors) if rank != lost]
    assert all(isinstance(e, InstanceLost) for r, e in enumerate(errors) if r != lost), errors
    assert all(f"rank {lost} is dead or silent" in text for text in said), said


def test_a_silent_rank_is_noticed_in_time_and_named():
    groups = groups_of(Parallelism(1, 3), timeout_s=0.5)
    started_at = time.monotonic()

    def work(rank: int) -> None:
        if rank == 2:
            time.sleep(1.5)
            return
        groups[rank].receive(torch.zeros(1), 2, 7)()

    errors = on_all(3, work)
    assert "rank 2 is dead or silent" in str(errors[0])
    assert time.monotonic() - started_at < 5
    for each in groups:
        each.close()


def test_a_rank_that_fails_says_why():
    groups = groups_of(Parallelism(2, 1), timeout_s=2)

    def work(rank: int) -> None:
        if rank == 1:
            raise groups[1].fail(ValueError("no such weight"))
        ask_all(groups[0])

    errors = on_all(2, work)
    for error in errors:
        assert "TP2xPP1 is lost: rank 1 failed: ValueError: no such weight" in str(error)


def test_a_rank_joins_a_group_once():
    meeting, store = open_group(Parallelism(2, 1), HOST, 5)
    join_group(meeting, 1, 5)
    with pytest.raises(InstanceLost, match="rank 1 of the group at .* is taken"):
        join_group(meeting, 1, 5)
    del store
    with pytest.raises(InstanceLost, match="no head at"):
        join_group(meeting, 1, 0.5)


def test_a_follower_that_never_comes_is_an_error_in_time():
    _, store = open_group(Parallelism(2, 1), HOST, 0.5)
    with pytest.raises(InstanceLost, match="rank 1 is dead or silent"):
        RankGroup(store, Parallelism(2, 1), 0, host=HOST, timeout_s=0.5, assembly_s=0.5)


def test_an_instance_that_loses_a_rank_is_lost_when_it_computes_and_when_it_idles():
    for is_idle in (False, True):
        lost = []
        ranks = launch(CONFIG, Parallelism(1, 2))
        ranks.runner._on_lost = lost.append
        engine = ranks.engine(Role.COLOCATED)
        ranks.followers[1].stage.group.close()
        if is_idle:
            deadline = time.monotonic() + 5
            while not lost and time.monotonic() < deadline:
                time.sleep(0.01)
        with pytest.raises(InstanceLost, match="of TP1xPP2 is lost: rank 1 "):
            ranks.runner.beat()
        with pytest.raises(InstanceLost, match="of TP1xPP2 is lost: rank 1 "):
            engine.pool.begin_digests([[1]])()
        assert len(lost) == 1
        ranks.close()


def test_a_rank_that_is_gone_while_steps_are_open_loses_the_instance_once():
    lost = []
    ranks = launch(CONFIG, Parallelism(1, 2))
    ranks.runner._on_lost = lost.append
    ranks.runner.bind(ranks.runner.new_pool(8, 16).pages)
    ones = np.ones(1, np.int32)
    step = ForwardBatch(ones, ones - 1, np.array([0, 1], np.int32), ones, ones[:, None])
    ranks.runner.begin(step, [])()
    begun = [ranks.runner.begin(step, []) for _ in range(ranks.runner.max_open)]
    assert len(begun) == 2
    ranks.followers[1].stage.group.close()
    with pytest.raises(InstanceLost, match="of TP1xPP2 is lost: rank 1 "):
        for finish in [*begun, ranks.runner.begin(step, [])]:
            finish()
    assert len(lost) == 1
    ranks.close()

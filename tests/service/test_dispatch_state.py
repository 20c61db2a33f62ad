"""Laws of the dispatch books: first come first served, nothing stranded, every block given back."""

from __future__ import annotations

import random

import pytest

from daskserve.core.instance import Role
from daskserve.errors import InvalidParameter
from daskserve.service.dispatch_state import DispatchState, InstanceState, Stage

BLOCK = 16
PROBATION_S = 2.0


def state_with(role: Role, *sizes: int, slots: int = 8, max_losses: int = 2) -> DispatchState:
    state = DispatchState(max_losses, probation_s=PROBATION_S)
    for index, num_blocks in enumerate(sizes):
        state.add_instance(InstanceState(f"w{index}", role, slots, num_blocks, BLOCK))
    return state


def arrive(state: DispatchState, role: Role, *tokens: int, name: str = "s") -> list[Stage]:
    return [state.arrive(Stage(f"{name}{i}", role, n, n)) for i, n in enumerate(tokens)]


def bind_all(state: DispatchState, role: Role, now: float = 0.0) -> list[tuple[str, str]]:
    bound = []
    while (binding := state.next_binding(role, now)) is not None:
        stage, instance = binding
        bound.append((stage.key, instance.address))
    return bound


def test_prefills_go_to_the_shortest_queue():
    state = state_with(Role.PREFILL, 100, 100)
    arrive(state, Role.PREFILL, 100, 10, 20, 30, 50)
    assert bind_all(state, Role.PREFILL) == [
        ("s0", "w0"),
        ("s1", "w1"),
        ("s2", "w1"),
        ("s3", "w1"),
        ("s4", "w1"),
    ]


def test_decodes_go_where_the_smallest_share_of_blocks_is_used():
    state = state_with(Role.DECODE, 10, 40)
    arrive(state, Role.DECODE, 4 * BLOCK, 4 * BLOCK, 4 * BLOCK)
    assert [address for _, address in bind_all(state, Role.DECODE)] == ["w0", "w1", "w1"]


def test_a_full_instance_does_not_strand_what_another_has_room_for():
    state = state_with(Role.DECODE, 4, 4)
    arrive(state, Role.DECODE, *[4 * BLOCK] * 3)
    assert bind_all(state, Role.DECODE) == [("s0", "w0"), ("s1", "w1")]
    state.leave("s1")
    assert bind_all(state, Role.DECODE) == [("s2", "w1")]


def test_a_large_one_at_the_head_is_not_overtaken():
    state = state_with(Role.DECODE, 4)
    arrive(state, Role.DECODE, 2 * BLOCK, 4 * BLOCK, BLOCK)
    assert bind_all(state, Role.DECODE) == [("s0", "w0")]
    state.leave("s0")
    assert bind_all(state, Role.DECODE) == [("s1", "w0")]


def test_finished_kv_takes_room_on_its_prefill_instance_until_it_is_let_go():
    state = state_with(Role.PREFILL, 4)
    arrive(state, Role.PREFILL, 3 * BLOCK, 3 * BLOCK)
    assert bind_all(state, Role.PREFILL) == [("s0", "w0")]
    state.leave("s0")
    state.hold("s0", "w0", 3 * BLOCK)
    assert bind_all(state, Role.PREFILL) == []
    state.let_go("s0")
    state.let_go("s0")
    assert bind_all(state, Role.PREFILL) == [("s1", "w0")]


def test_an_instance_that_takes_no_tasks_is_passed_over():
    state = state_with(Role.DECODE, 9, 9)
    state.instances["w0"].is_accepting = False
    arrive(state, Role.DECODE, BLOCK)
    assert bind_all(state, Role.DECODE) == [("s0", "w1")]


def test_a_draining_instance_gets_nothing_and_finishes_what_it_has():
    state = state_with(Role.DECODE, 9, 9)
    arrive(state, Role.DECODE, BLOCK, BLOCK)
    bind_all(state, Role.DECODE)
    state.drain("w0")
    assert not state.is_drained("w0")
    arrive(state, Role.DECODE, BLOCK, BLOCK, name="later")
    assert bind_all(state, Role.DECODE) == [("later0", "w1"), ("later1", "w1")]
    assert state.counters(Role.DECODE)["draining"] == 1
    assert state.counters(Role.DECODE)["accepting"] == 1
    state.leave("s0")
    assert state.is_drained("w0") and not state.is_drained("w1")


def test_no_suspect_is_tried_on_a_draining_instance():
    state = state_with(Role.DECODE, 100)
    arrive(state, Role.DECODE, BLOCK)
    bind_all(state, Role.DECODE)
    lose(state, Role.DECODE, "w0", now=0.1)
    state.drain("after-w0")
    assert bind_all(state, Role.DECODE, now=0.2) == []
    state.resume("after-w0")
    assert bind_all(state, Role.DECODE, now=0.3) == [("s0", "after-w0")]


def test_finished_kv_that_waits_keeps_a_prefill_instance_from_being_drained():
    state = state_with(Role.PREFILL, 9)
    arrive(state, Role.PREFILL, BLOCK)
    bind_all(state, Role.PREFILL)
    state.leave("s0")
    state.hold("s0", "w0", BLOCK)
    state.drain("w0")
    assert not state.is_drained("w0")
    state.let_go("s0")
    assert state.is_drained("w0")


def test_an_idle_instance_that_was_not_told_to_drain_is_not_drained_and_a_lost_one_is():
    state = state_with(Role.DECODE, 9)
    assert not state.is_drained("w0")
    state.remove_instance("w0", is_loss=True, now=0.0)
    assert state.is_drained("w0")


def test_a_drained_instance_takes_another_role():
    state = state_with(Role.DECODE, 9, 9)
    state.drain("w0")
    state.resume("w0", Role.PREFILL, slots=2)
    arrive(state, Role.PREFILL, BLOCK, BLOCK, BLOCK)
    assert bind_all(state, Role.PREFILL) == [("s0", "w0"), ("s1", "w0")]
    arrive(state, Role.DECODE, BLOCK, name="d")
    assert bind_all(state, Role.DECODE) == [("d0", "w1")]


def test_a_role_changes_only_when_nothing_of_the_old_one_is_left():
    state = state_with(Role.DECODE, 9)
    arrive(state, Role.DECODE, BLOCK)
    bind_all(state, Role.DECODE)
    for address in ("w0", "w7"):
        with pytest.raises(InvalidParameter, match=address):
            state.resume(address, Role.PREFILL)
    state.drain("w0")
    with pytest.raises(InvalidParameter, match="still works as DECODE"):
        state.resume("w0", Role.PREFILL)
    with pytest.raises(InvalidParameter, match="must be one that is ready: w0"):
        state.drain("w7")


def test_a_rerun_keeps_its_place_in_line():
    state = state_with(Role.DECODE, 4, 4)
    first, *_ = arrive(state, Role.DECODE, *[4 * BLOCK] * 4)
    bind_all(state, Role.DECODE)
    state.remove_instance("w0", is_loss=False, now=0.0)
    state.arrive(first)
    state.leave("s1")
    assert bind_all(state, Role.DECODE) == [("s0", "w1")]


def lose(state: DispatchState, role: Role, address: str, now: float) -> None:
    """Lose an instance, have a new one, and all that is unfinished arrive again."""
    state.remove_instance(address, is_loss=True, now=now)
    state.add_instance(InstanceState(f"after-{address}", role, 8, 100, BLOCK))
    for stage in list(state.stages.values()):
        if not stage.is_convicted:
            state.arrive(stage)


def test_suspects_run_one_by_one_beside_the_others():
    state = state_with(Role.DECODE, 100)
    arrive(state, Role.DECODE, BLOCK, BLOCK)
    bind_all(state, Role.DECODE, now=0.0)
    lose(state, Role.DECODE, "w0", now=1.0)
    arrive(state, Role.DECODE, BLOCK, name="fresh")
    assert [key for key, _ in bind_all(state, Role.DECODE, now=5.0)] == ["s0", "fresh0"]
    state.end_probations(now=6.9)
    assert bind_all(state, Role.DECODE, now=6.9) == []
    state.end_probations(now=7.0)
    assert [key for key, _ in bind_all(state, Role.DECODE, now=7.0)] == ["s1"]


def test_whoever_dies_on_probation_is_convicted_and_no_other():
    state = state_with(Role.DECODE, 100)
    arrive(state, Role.DECODE, BLOCK, BLOCK)
    bind_all(state, Role.DECODE, now=0.0)
    lose(state, Role.DECODE, "w0", now=0.5)
    arrive(state, Role.DECODE, BLOCK, name="fresh")
    bind_all(state, Role.DECODE, now=1.0)
    lose(state, Role.DECODE, "after-w0", now=1.5)
    convicted = [s.key for s in state.stages.values() if s.is_convicted]
    suspects = [s.key for s in state.stages.values() if s.is_suspect and not s.is_convicted]
    assert (convicted, suspects) == (["s0"], ["s1", "fresh0"])


def test_what_has_run_for_long_is_no_suspect():
    state = state_with(Role.DECODE, 100)
    arrive(state, Role.DECODE, BLOCK, BLOCK)
    bind_all(state, Role.DECODE, now=0.0)
    lose(state, Role.DECODE, "w0", now=3.0)
    assert [key for key, _ in bind_all(state, Role.DECODE, now=3.0)] == ["s0", "s1"]


def test_a_late_culprit_is_convicted_with_its_third_instance():
    state = state_with(Role.DECODE, 100)
    arrive(state, Role.DECODE, BLOCK, BLOCK)
    for number, address in enumerate(["w0", "after-w0", "after-after-w0"]):
        bind_all(state, Role.DECODE, now=10.0 * number)
        state.end_probations(now=10.0 * number + 5)
        bind_all(state, Role.DECODE, now=10.0 * number + 5)
        lose(state, Role.DECODE, address, now=10.0 * number + 9)
    assert [s.is_convicted for s in state.stages.values()] == [True, False]


def test_a_worker_that_leaves_orderly_makes_nobody_suspect():
    state = state_with(Role.PREFILL, 100)
    [stage] = arrive(state, Role.PREFILL, BLOCK)
    bind_all(state, Role.PREFILL)
    state.remove_instance("w0", is_loss=False, now=0.1)
    assert not stage.is_suspect and not stage.losses


@pytest.mark.parametrize("seed", range(5))
def test_books_balance_under_random_traffic(seed: int):
    rng = random.Random(seed)
    state = state_with(Role.DECODE, 20, 30, 10, slots=3)
    running: list[str] = []
    served: list[int] = []
    for step in range(400):
        if rng.random() < 0.5:
            state.arrive(Stage(f"r{step}", Role.DECODE, 1, rng.randint(1, 10 * BLOCK)))
        elif running:
            state.leave(running.pop(rng.randrange(len(running))))
        for key, _ in bind_all(state, Role.DECODE):
            running.append(key)
            served.append(state.stages[key].ticket)
        for instance in state.instances.values():
            blocks = sum(stage.blocks_on(instance) for stage in instance.bound.values())
            assert instance.used_blocks == blocks <= instance.num_blocks
            assert len(instance.bound) <= instance.slots
    assert served == sorted(served)
    for key in list(state.stages):
        state.leave(key)
    assert all(i.used_blocks == i.queued_tokens == 0 for i in state.instances.values())
    assert state.num_waiting(Role.DECODE) == 0

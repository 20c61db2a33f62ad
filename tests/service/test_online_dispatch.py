"""Laws of online requests in dispatch: one place at a time, in order, and all given back."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daskserve.config import settings as configured
from daskserve.core.instance import Role
from daskserve.errors import ClusterError, InstanceLost, KilledInstance, Overloaded
from daskserve.service.dispatch_state import DispatchState, InstanceState, Stage
from daskserve.service.names import prefill_key, request_id_of
from daskserve.service.online_dispatch import OnlineDispatch
from daskserve.service.online_wire import unpack_error

BLOCK = 16


class FakeLink:
    """A service that remembers what it was told."""

    def __init__(self) -> None:
        self.told: list[dict[str, Any]] = []

    def send(self, message: dict[str, Any]) -> None:
        self.told.append(message)

    def last(self, request_id: str) -> dict[str, Any] | None:
        return next((m for m in reversed(self.told) if m["request_id"] == request_id), None)


class World:
    """Books and online requests without a scheduler; instances hold blocks until told to free."""

    def __init__(self, **limits: int) -> None:
        self.now = 0.0
        self.state = DispatchState(max_losses=2, probation_s=2.0)
        self.freed: list[tuple[str, str]] = []
        service = configured().service.model_copy(update=limits)
        self.online = OnlineDispatch(SimpleNamespace(generation=0), service, self)
        self.link = FakeLink()
        self.has_progress = False
        self.num_heard = 0

    # What the plugin does.

    def wake(self) -> None: ...

    def free_kv_at(self, address: str, request_id: str) -> None:
        self.freed.append((address, request_id))

    def pump(self) -> None:
        while self.num_heard < len(self.link.told):  # the service answers to what was lost
            told = self.link.told[self.num_heard]
            self.num_heard += 1
            if told["op"] == "lost":
                resume = {"op": "resume", "has_progress": self.has_progress}
                self.online._on_message(self.link, {**told, **resume})
        for role in (Role.DECODE, Role.COLOCATED, Role.PREFILL):
            while (binding := self.state.next_binding(role, self.now)) is not None:
                stage, instance = binding
                if role is Role.DECODE:
                    self.state.let_go(prefill_key(request_id_of(stage.key)))
                if self.online.owns(stage.key):
                    self.online.bound(stage, instance)

    def lose(self, address: str) -> None:
        instance = self.state.instances[address]
        bound = list(instance.bound.values())
        self.state.remove_instance(address, is_loss=True, now=self.now)
        self.online.instance_gone(address, bound)
        for stage in bound:
            if not self.online.owns(stage.key) and stage.key in self.state.stages:
                self.state.arrive(stage)
        self.pump()

    def start(self, role: Role, address: str, num_blocks: int = 20, slots: int = 3) -> None:
        self.state.add_instance(InstanceState(address, role, slots, num_blocks, BLOCK))
        self.pump()

    # What a service says.

    def say(self, op: str, request_id: str, **fields: Any) -> dict[str, Any] | None:
        self.online._on_message(self.link, {"op": op, "request_id": request_id, **fields})
        self.pump()
        return self.link.last(request_id)

    def open(self, request_id: str, prompt: int = 8, new: int = 8, **fields: Any):
        facts = {"prompt_tokens": prompt, "max_tokens": new, "is_colocated": False}
        return self.say("open", request_id, **{**facts, "max_queue": None, **fields})

    def error(self, request_id: str) -> Exception:
        return unpack_error(self.link.last(request_id)["error"])


def pair(**limits: int) -> World:
    world = World(**limits)
    world.start(Role.PREFILL, "p0")
    world.start(Role.DECODE, "d0")
    return world


def test_a_request_goes_from_a_prefill_to_a_decode_instance():
    world = pair()
    bound = world.open("1-a")
    assert (bound["op"], bound["role"], bound["address"]) == ("bound", "PREFILL", "p0")
    bound = world.say("prefilled", "1-a", run_id=bound["run_id"])
    assert (bound["role"], bound["address"], bound["run_id"]) == ("DECODE", "d0", "1-a")
    world.say("close", "1-a", is_done=True)
    assert world.freed == [("p0", "1-a")]  # in case its pull failed
    assert world.online.num_open == 0
    assert all(i.used_blocks == i.queued_tokens == 0 for i in world.state.instances.values())


@pytest.mark.parametrize("is_prefilled", [False, True])
def test_a_request_that_is_given_up_is_freed_where_it_is(is_prefilled: bool):
    world = pair()
    bound = world.open("1-a")
    if is_prefilled:
        world.say("prefilled", "1-a", run_id=bound["run_id"])
    world.say("close", "1-a", is_done=False)
    assert set(world.freed) == ({("p0", "1-a"), ("d0", "1-a")} if is_prefilled else {("p0", "1-a")})


def test_kv_that_waits_and_is_lost_is_made_anew_under_another_name():
    world = World()
    world.start(Role.PREFILL, "p0")
    bound = world.open("1-a")
    world.say("prefilled", "1-a", run_id=bound["run_id"])
    world.lose("p0")
    world.start(Role.PREFILL, "p1")
    again = world.link.last("1-a")
    assert (again["role"], again["address"]) == ("PREFILL", "p1")
    assert again["run_id"] != bound["run_id"]
    late = world.say("prefilled", "1-a", run_id=bound["run_id"])
    assert late is again  # what the lost run says changes nothing
    world.start(Role.DECODE, "d0")
    assert world.say("prefilled", "1-a", run_id=again["run_id"])["role"] == "DECODE"


def test_a_lost_decode_goes_elsewhere_at_once():
    world = pair()
    bound = world.open("1-a")
    first = world.say("prefilled", "1-a", run_id=bound["run_id"])
    world.start(Role.DECODE, "d1")
    world.lose("d0")
    second = world.link.last("1-a")
    assert (second["role"], second["address"]) == ("DECODE", "d1")
    assert second["run_id"] != first["run_id"]


def test_who_takes_down_one_instance_after_another_is_given_up():
    world = pair()
    world.open("1-a")
    for number in range(2):
        world.lose(f"p{number}")
        world.start(Role.PREFILL, f"p{number + 1}")
    assert isinstance(world.error("1-a"), KilledInstance)
    assert world.online.num_open == 0


@pytest.mark.parametrize("has_progress", [False, True])
def test_only_those_that_had_not_got_on_are_tried_alone(has_progress: bool):
    world = World()
    world.has_progress = has_progress
    world.start(Role.COLOCATED, "c0")
    for number in range(3):
        world.open(f"{number}-a", is_colocated=True)
    world.lose("c0")
    world.start(Role.COLOCATED, "c1")
    bound = [world.link.last(f"{number}-a")["op"] for number in range(3)]
    assert bound == (["bound"] * 3 if has_progress else ["bound", "lost", "lost"])


def test_a_service_that_does_not_answer_holds_up_nobody():
    world = pair()
    world.open("1-a")
    world.num_heard = 10**9
    world.lose("p0")
    world.start(Role.PREFILL, "p1")
    assert world.link.last("1-a")["op"] == "lost"
    assert world.open("2-a")["address"] == "p1"
    world.say("close", "1-a", is_done=False)
    world.say("close", "2-a", is_done=False)
    assert world.online.num_open == 0 and not world.state.stages


def test_an_unreachable_instance_is_not_chosen_again():
    world = pair()
    world.start(Role.PREFILL, "p1")
    bound = world.open("1-a")
    again = world.say("again", "1-a", run_id=bound["run_id"])
    assert {bound["address"], again["address"]} == {"p0", "p1"}
    assert (bound["address"], bound["run_id"]) in world.freed
    world.say("again", "1-a", run_id=again["run_id"])
    assert isinstance(world.error("1-a"), InstanceLost)


def test_futures_and_streams_share_one_queue():
    world = World()
    world.state.arrive(Stage("prefill-task0", Role.PREFILL, 8, 8, rank=(0, 0, 0)))
    world.open("1-a")
    world.state.arrive(Stage("prefill-task1", Role.PREFILL, 8, 8, rank=(0, 1, 0)))
    waiting = [stage.key for stage in world.state.waiting(Role.PREFILL)]
    assert waiting == ["prefill-task0", "prefill-1-a", "prefill-task1"]


def test_a_full_queue_refuses_at_once_and_says_when_to_come_back():
    world = pair(max_waiting_requests=3)
    answers = [world.open(f"{i}-a", prompt=160) for i in range(6)]
    assert [a["op"] if a else None for a in answers] == ["bound"] * 2 + [None] * 2 + ["refused"] * 2
    error = world.error("5-a")
    assert isinstance(error, Overloaded) and error.retry_after_s >= 1
    assert "4 requests of 640 prompt tokens" in str(error)
    world.say("close", "0-a", is_done=False)
    assert world.open("6-a", prompt=160) is None  # room again: it waits


def test_the_queue_is_bounded_in_prompt_tokens_too():
    world = pair(max_waiting_prompt_tokens=100)
    assert world.open("1-a", prompt=200)["op"] == "bound"  # alone, whatever its length
    assert isinstance((world.open("2-a", prompt=1), world.error("2-a"))[1], Overloaded)


def test_a_request_may_ask_for_a_shorter_queue():
    world = pair()
    world.open("1-a")
    world.open("2-a", max_queue=1)
    world.open("3-a", max_queue=1)
    assert world.link.last("2-a")["op"] == "bound"
    assert isinstance(world.error("3-a"), Overloaded)


def test_a_service_cannot_touch_the_requests_of_another():
    world = pair()
    run_id = world.open("1-a")["run_id"]
    for said in ({"op": "prefilled"}, {"op": "again"}, {"op": "close", "is_done": False}):
        world.online._on_message(FakeLink(), {"request_id": "1-a", "run_id": run_id, **said})
        world.pump()
    assert [message["op"] for message in world.link.told] == ["bound"]
    assert world.online.num_open == 1 and not world.freed


def test_when_dispatch_gives_up_everybody_is_told():
    world = pair()
    bound = world.open("1-a")
    world.open("2-a")
    world.say("prefilled", "1-a", run_id=bound["run_id"])
    world.online.refuse_all(ClusterError("restarted"))
    assert [str(world.error(f"{i}-a")) for i in (1, 2)] == ["restarted"] * 2
    assert world.online.num_open == 0 and not world.state.stages


def test_an_id_cannot_be_opened_twice():
    world = pair()
    world.open("1-a")
    assert "open already" in str((world.open("1-a"), world.error("1-a"))[1])


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(
            ["open", "task", "advance", "advance", "again", "stale", "abort", "lose", "start"]
        ),
        st.integers(0, 1000),
    ),
    max_size=60,
)


@settings(max_examples=150, deadline=None)
@given(OPERATIONS, st.booleans())
def test_books_return_to_zero_whatever_happens(operations, is_colocated: bool):
    world = World()
    roles = [Role.COLOCATED] if is_colocated else [Role.PREFILL, Role.DECODE]
    instances = 0
    open_ids: list[str] = []
    tasks: list[str] = []

    def start(number: int) -> None:
        nonlocal instances
        instances += 1
        world.start(roles[number % len(roles)], f"w{instances}", num_blocks=5 + number % 20)

    for number in range(2):
        start(number)
    for step, (operation, number) in enumerate(operations):
        world.now += 0.3
        world.has_progress = number % 2 == 0
        world.state.end_probations(world.now)
        request_id = open_ids[number % len(open_ids)] if open_ids else ""
        last = world.link.last(request_id) or {}
        if operation == "open":
            open_ids.append(f"{step}-a")
            world.open(open_ids[-1], 1 + number % 60, 1 + number % 7, is_colocated=is_colocated)
        elif operation == "task":
            tasks.append(f"prefill-{step}-t" if not is_colocated else f"decode-{step}-t")
            world.state.arrive(Stage(tasks[-1], roles[0], 5, 5 + number % 40, (0, step, 0)))
            world.pump()
        elif operation == "advance" and last.get("op") == "bound":
            is_last = last["role"] != "PREFILL"
            said = {"is_done": True} if is_last else {"run_id": last["run_id"]}
            world.say("close" if is_last else "prefilled", request_id, **said)
        elif operation == "again" and last.get("op") == "bound":
            world.say("again", request_id, run_id=last["run_id"])
        elif operation == "stale":
            world.say("prefilled", request_id, run_id=f"{request_id}.77")
        elif operation == "abort":
            world.say("close", request_id, is_done=False)
        elif operation == "lose" and world.state.instances:
            world.lose(sorted(world.state.instances)[number % len(world.state.instances)])
        elif operation == "start":
            start(number)
        check_books(world)
    for request_id in open_ids:
        world.say("close", request_id, is_done=False)
    for key in tasks:
        world.state.leave(key)
    assert world.online.num_open == 0 and not world.state.stages
    assert all(i.used_blocks == i.queued_tokens == 0 for i in world.state.instances.values())
    assert all(world.state.num_waiting(role) == 0 for role in Role)
    assert all(world.state.waiting_tokens(role) == 0 for role in Role)


def check_books(world: World) -> None:
    held = dict(world.online.homes())
    for role in Role:
        waiting = world.state.waiting(role)
        assert world.state.waiting_tokens(role) == sum(s.prompt_tokens for s in waiting)
        assert len({s.key for s in waiting}) == len(waiting)
    for instance in world.state.instances.values():
        blocks = sum(stage.blocks_on(instance) for stage in instance.bound.values())
        assert instance.used_blocks == blocks + world.state.held_blocks(instance)
        assert instance.used_blocks <= instance.num_blocks
        assert len(instance.bound) <= instance.slots
        told = {stage.key for stage in world.online.told_to_use(instance.address)}
        assert told == {key for key in instance.bound if world.online.owns(key)}
    assert set(held) <= set(world.state.instances)

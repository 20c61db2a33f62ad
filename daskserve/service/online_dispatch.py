"""The scheduler's side of online requests: the same queues and books as the futures, no tasks.

A service opens a request, is told where its prefill and then its decode is bound, talks to those
instances itself, and closes the request. Every change of mind is one message: LOST, then another
BOUND. In between the service says how far it had got, which clears most of the suspicion of having
brought an instance down. When its link ends, all that it had open is given back.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from distributed import Scheduler
from distributed.comm import Comm
from distributed.core import Status

from daskserve.config import ServiceSettings
from daskserve.core.instance import Role
from daskserve.errors import ClusterError, DaskserveError, InstanceLost, KilledInstance, Overloaded
from daskserve.service.dispatch_state import DispatchState, InstanceState, Stage
from daskserve.service.link import Link, Message
from daskserve.service.names import Facts, decode_key, prefill_key, run_name
from daskserve.service.online_wire import (
    AGAIN,
    BOUND,
    CLOSE,
    LOST,
    OPEN,
    PREFILLED,
    REFUSED,
    RESUME,
    pack_error,
)

logger = logging.getLogger(__name__)

_NUM_STARTS = 32  # that the rate of service is taken from
_LEAST_RETRY_S, _MOST_RETRY_S = 1.0, 60.0


@dataclass(slots=True, eq=False)
class OnlineRequest:
    """A request that is open: one stage of it waits, or is bound, or is to be resumed."""

    request_id: str
    link: Link
    facts: Facts
    rank: tuple[float, ...]
    stage: Stage
    run: int = 0
    home: str | None = None
    """Address that may hold the KV of this run."""
    told: str | None = None
    """Address that its service was told to use for the stage."""
    is_lost: bool = False
    """Its service has yet to answer that the last run was lost."""
    shunned: set[str] = field(default_factory=set)

    @property
    def run_id(self) -> str:
        return run_name(self.request_id, self.run)


class Dispatch(Protocol):
    """What is asked of the dispatch plugin."""

    state: DispatchState

    def wake(self) -> None: ...
    def free_kv_at(self, address: str, request_id: str) -> None: ...


class OnlineDispatch:
    """Open requests of all services on the scheduler.

    Parameters
    ----------
    scheduler
        For the place of a request among the graphs.
    settings
        Limits of the queues.
    dispatch
        Owner of the books; its pump binds.
    """

    def __init__(self, scheduler: Scheduler, settings: ServiceSettings, dispatch: Dispatch) -> None:
        self._scheduler = scheduler
        self._settings = settings
        self._dispatch = dispatch
        self._requests: dict[str, OnlineRequest] = {}
        self._by_key: dict[str, OnlineRequest] = {}
        self._links: set[Link] = set()
        self._starts = {role: deque[float](maxlen=_NUM_STARTS) for role in Role}
        self._handlers: dict[str, Callable[[Link, Message], None]] = {
            OPEN: self._open,
            PREFILLED: self._prefilled,
            AGAIN: self._again,
            RESUME: self._resume,
            CLOSE: self._close,
        }

    async def serve(self, comm: Comm) -> Status:
        """Handler of the scheduler: the link of one service, to its end."""
        link = Link(self._settings.link_silence_s)
        self._links.add(link)
        try:
            await link.talk(comm, partial(self._on_message, link))
        finally:
            self._links.discard(link)
            for request in [r for r in self._requests.values() if r.link is link]:
                self._drop(request)
        return Status.dont_reply

    def stop(self) -> None:
        for link in self._links:
            link.cut()

    # For the plugin.

    @property
    def num_open(self) -> int:
        return len(self._requests)

    def owns(self, key: str) -> bool:
        """Whether a stage is of an online request."""
        return key in self._by_key

    def bound(self, stage: Stage, instance: InstanceState) -> None:
        """The pump has bound a stage: its service is told."""
        request = self._by_key[stage.key]
        request.told = instance.address
        self._starts[stage.role].append(time.monotonic())
        request.link.send(
            {
                "op": BOUND,
                "request_id": request.request_id,
                "run_id": request.run_id,
                "role": stage.role.value,
                "address": instance.address,
            }
        )

    def refuse(self, stage: Stage, error: DaskserveError) -> None:
        """A stage will never run: its request fails."""
        request = self._by_key[stage.key]
        _send_refusal(request.link, request.request_id, error)
        self._drop(request)

    def instance_gone(self, address: str, was_bound: list[Stage]) -> None:
        """What was bound to an instance waits again; KV that nobody has pulled is made anew."""
        for stage in was_bound:
            request = self._by_key.get(stage.key)
            if request is not None:
                self._lose(request)
        for request in [r for r in self._requests.values() if r.home == address]:
            request.home = None
            if request.told is None:
                self._dispatch.state.leave(request.stage.key)
                self._set_stage(request, Role.PREFILL)
                self._lose(request)

    def refuse_all(self, error: DaskserveError) -> None:
        """Every request fails, wherever it is."""
        for request in list(self._requests.values()):
            _send_refusal(request.link, request.request_id, error)
            self._drop(request)

    def homes(self) -> Iterator[tuple[str, str]]:
        """Addresses that hold KV, with the run that it belongs to."""
        return ((r.home, r.run_id) for r in self._requests.values() if r.home is not None)

    def told_to_use(self, address: str) -> list[Stage]:
        """Stages whose services were told to use an instance."""
        return [r.stage for r in self._requests.values() if r.told == address]

    # Messages of services.

    def _on_message(self, link: Link, message: Message) -> None:
        request_id = message.get("request_id", "")
        try:
            self._handlers[message["op"]](link, message)
        except Exception as error:
            logger.exception("an online request failed in dispatch")
            _send_refusal(link, request_id, ClusterError(f"dispatch failed: {error!r}"))

    def _open(self, link: Link, message: Message) -> None:
        request_id = message["request_id"]
        if request_id in self._requests:
            raise ValueError(f"{request_id} is open already")
        facts = Facts(message["prompt_tokens"], message["max_tokens"], 0)
        role = Role.COLOCATED if message["is_colocated"] else Role.PREFILL
        overloaded = self._overloaded(role, facts, message["max_queue"])
        if overloaded is not None:
            self._dispatch.state.num_arrived += 1
            self._dispatch.state.num_refused += 1
            _send_refusal(link, request_id, overloaded)
            return
        # Behind the graphs that came before, ahead of those to come.
        rank = (0, self._scheduler.generation, math.inf)
        stage = _stage(request_id, role, facts, rank, set())
        request = OnlineRequest(request_id, link, facts, rank, stage, shunned=stage.shunned)
        self._requests[request_id] = self._by_key[stage.key] = request
        self._arrive(request)

    def _prefilled(self, link: Link, message: Message) -> None:
        request = self._current(link, message)
        if request is None or request.stage.role is not Role.PREFILL or request.told is None:
            return
        key = request.stage.key
        self._dispatch.state.leave(key)
        self._dispatch.state.hold(key, request.told, request.facts.prompt_tokens)
        request.home = request.told
        request.told = None
        self._set_stage(request, Role.DECODE)
        self._arrive(request)

    def _again(self, link: Link, message: Message) -> None:
        """A service cannot reach the instance that it was told to use."""
        request = self._current(link, message)
        if request is None or request.told is None:
            return
        stage = request.stage
        self._dispatch.free_kv_at(request.told, request.run_id)
        self._dispatch.state.withdraw(stage.key)
        stage.shunned.add(request.told)
        instances = self._dispatch.state.instances_of(stage.role)
        if all(instance.address in stage.shunned for instance in instances):
            text = f"no {stage.role.value} instance could be reached from the service"
            self.refuse(stage, InstanceLost(text))
            return
        self._lose(request)

    def _resume(self, link: Link, message: Message) -> None:
        """A service has heard that a run was lost."""
        request = self._current(link, message)
        if request is None or not request.is_lost:
            return
        request.is_lost = False
        if message["has_progress"]:
            self._dispatch.state.acquit(request.stage)
        self._arrive(request)

    def _close(self, link: Link, message: Message) -> None:
        request = self._requests.get(message["request_id"])
        if request is not None and request.link is link:
            self._drop(request, is_done=message["is_done"])

    # What they come to.

    def _current(self, link: Link, message: Message) -> OnlineRequest | None:
        """None when the message is about a run that was given up meanwhile."""
        request = self._requests.get(message["request_id"])
        if request is None or request.link is not link or request.run_id != message["run_id"]:
            return None
        return request

    def _set_stage(self, request: OnlineRequest, role: Role) -> None:
        del self._by_key[request.stage.key]
        request.stage = _stage(
            request.request_id, role, request.facts, request.rank, request.shunned
        )
        self._by_key[request.stage.key] = request

    def _arrive(self, request: OnlineRequest) -> None:
        stage = self._dispatch.state.arrive(request.stage)
        if stage.is_convicted:
            text = f"{stage.key}: {stage.losses} instances died while they ran it"
            self.refuse(stage, KilledInstance(text))
        self._dispatch.wake()

    def _lose(self, request: OnlineRequest) -> None:
        """This run is over without an answer."""
        self._free_home(request)
        request.told = None
        request.run += 1
        request.is_lost = True
        lost = {"op": LOST, "request_id": request.request_id, "run_id": request.run_id}
        request.link.send(lost)

    def _drop(self, request: OnlineRequest, is_done: bool = False) -> None:
        key = request.stage.key
        del self._requests[request.request_id]
        del self._by_key[key]
        if request.told is not None and not is_done:
            self._dispatch.free_kv_at(request.told, request.run_id)
        self._dispatch.state.leave(key)
        self._free_home(request)
        self._dispatch.wake()

    def _free_home(self, request: OnlineRequest) -> None:
        self._dispatch.state.let_go(prefill_key(request.request_id))
        if request.home is not None:
            self._dispatch.free_kv_at(request.home, request.run_id)
            request.home = None

    def _overloaded(self, role: Role, facts: Facts, max_queue: int | None) -> Overloaded | None:
        """Whether too much waits already for a role that a request will need."""
        most = self._settings.max_waiting_requests
        most = most if max_queue is None else min(most, max_queue)
        most_tokens = self._settings.max_waiting_prompt_tokens
        state = self._dispatch.state
        for needed in (role,) if role is Role.COLOCATED else (Role.PREFILL, Role.DECODE):
            count, tokens = state.num_waiting(needed), state.waiting_tokens(needed)
            if needed is Role.PREFILL:  # there, what is bound waits in its instance's queue
                count += sum(len(i.bound) for i in state.instances_of(needed))
                tokens += sum(i.queued_tokens for i in state.instances_of(needed))
            if count > most or (tokens and tokens + facts.prompt_tokens > most_tokens):
                text = f"{count} requests of {tokens} prompt tokens wait for {needed.value} already"
                return Overloaded(text, self._retry_after_s(needed, count))
        return None

    def _retry_after_s(self, role: Role, num_waiting: int) -> float:
        """Until half of what waits should have been served, at the rate of late."""
        starts = self._starts[role]
        if len(starts) < 2:
            return _LEAST_RETRY_S
        per_request_s = (time.monotonic() - starts[0]) / len(starts)
        return min(max(num_waiting / 2 * per_request_s, _LEAST_RETRY_S), _MOST_RETRY_S)


def _stage(
    request_id: str, role: Role, facts: Facts, rank: tuple[float, ...], shunned: set[str]
) -> Stage:
    key = prefill_key(request_id) if role is Role.PREFILL else decode_key(request_id)
    pool_tokens = facts.pool_tokens(role)
    return Stage(key, role, facts.prompt_tokens, pool_tokens, rank, shunned=shunned)


def _send_refusal(link: Link, request_id: Any, error: DaskserveError) -> None:
    link.send({"op": REFUSED, "request_id": request_id, "error": pack_error(error)})

"""The scheduler's side: binds every prefill and decode to an instance, task or online request.

Dask asks no plugin which worker to choose, so each of our tasks is first parked: restricted to
an address that no worker has, which leaves it unrunnable. After every event the pump binds what
has room now by naming the chosen instance as the only worker allowed. All choices happen there,
between events, on books that are exact.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

from distributed import Scheduler
from distributed.core import Status
from distributed.diagnostics.plugin import SchedulerPlugin
from distributed.protocol.pickle import dumps

from daskserve.config import ServiceSettings
from daskserve.core.instance import Role
from daskserve.errors import ClusterError, DaskserveError, KilledInstance
from daskserve.service.dispatch_check import DispatchCheck
from daskserve.service.dispatch_state import DispatchState, Stage
from daskserve.service.members import Members
from daskserve.service.names import (
    ANNOTATION,
    DISPATCH_PLUGIN,
    FREE_KV,
    Facts,
    decode_key,
    prefill_key,
    request_id_of,
    role_of,
)
from daskserve.service.online_dispatch import OnlineDispatch

logger = logging.getLogger(__name__)

_PARKED = {"daskserve://waits-for-room"}
_ENDED = ("memory", "erred", "forgotten")
_VANISHED = "its worker, rank 0, is dead or cut off"


class DispatchPlugin(SchedulerPlugin):
    """One per scheduler, shared by all services on it; touches only tasks that services submit.

    Parameters
    ----------
    settings
        Of the service that came first.
    """

    name = DISPATCH_PLUGIN
    idempotent = True

    def __init__(self, settings: ServiceSettings) -> None:
        self._settings = settings

    async def start(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._homes: dict[str, str] = {}  # request id -> address that holds its KV
        self._ready: list[str] = []  # keys of tasks that can run now
        self._orphans: list[str] = []  # prefill keys whose decode ended before them
        self._doomed: list[tuple[str, DaskserveError]] = []  # keys to fail
        self._is_pump_due = False
        self._has_complained = False
        self.online = OnlineDispatch(scheduler, self._settings, self)
        self.members = Members(scheduler, self._settings, self)
        self._reset()
        self.members.start()

    def _reset(self) -> None:
        self.state = DispatchState(self._settings.max_attempts, self._settings.probation_s)
        self.check = None
        if self._settings.check_dispatch:
            self.check = DispatchCheck(self._scheduler, self.state, self.online.told_to_use)

    # Hooks of Dask. They run inside the scheduler's own bookkeeping: they take notes, and the
    # pump acts as soon as the scheduler is done.

    def transition(
        self, key: Any, start: str, finish: str, *args: Any, stimulus_id: str, **kwargs: Any
    ) -> None:
        request_id = request_id_of(key)
        ts = self._scheduler.tasks.get(key) if request_id is not None else None
        if ts is None or ANNOTATION not in (ts.annotations or ()):
            return
        try:
            self._follow(ts, request_id, start, finish, kwargs.get("worker"))
        except Exception:
            self._complain()
            ts.worker_restrictions = None

    def remove_worker(self, scheduler: Scheduler, worker: str, **kwargs: Any) -> None:
        try:
            self.lose(worker, None if _was_expected(scheduler, worker) else _VANISHED)
            self._rerun_prefills_of(worker)
        except Exception:
            self._complain()

    def restart(self, scheduler: Scheduler) -> None:
        self._homes.clear()
        self.members.clear()
        self.online.refuse_all(ClusterError("the cluster was restarted"))
        self._reset()

    async def close(self) -> None:
        self.members.stop()
        self.online.stop()

    def wake(self) -> None:
        """Have the pump run once the scheduler has finished what it is doing."""
        if not self._is_pump_due:
            self._is_pump_due = True
            asyncio.get_running_loop().call_soon(self._pump)

    def lose(self, address: str, reason: str | None) -> None:
        """An instance is gone, its worker perhaps too; why, unless it had been asked to go."""
        self.members.forget(address, reason)
        instance = self.state.instances.get(address)
        was_bound = list(instance.bound.values()) if instance is not None else []
        self.state.remove_instance(address, reason is not None, time.monotonic())
        self.online.instance_gone(address, was_bound)
        self.wake()

    def doom(self, stages: list[Stage], error: DaskserveError) -> None:
        """Fail waiting stages from the pump."""
        self._doomed += [(stage.key, error) for stage in stages]
        self.state.num_refused += len(stages)
        self.wake()

    def free_kv_at(self, address: str, request_id: str) -> None:
        """Have an instance give up a request, in whatever state it is there."""
        if address in self._scheduler.workers:
            message = {"op": FREE_KV, "request_id": request_id}
            self._scheduler.worker_send(address, message)

    def homes(self) -> dict[str, list[str]]:
        """Addresses that hold KV, with the requests it belongs to."""
        by_address: dict[str, list[str]] = {}
        online = ((run_id, address) for address, run_id in self.online.homes())
        for request_id, address in (*self._homes.items(), *online):
            by_address.setdefault(address, []).append(request_id)
        return by_address

    def describe(self) -> dict[str, Any]:
        """Counters for people and tests."""
        check = self.check
        return {
            "roles": {role.value: self.state.counters(role) for role in Role},
            "waiting": {role.value: self.state.num_waiting(role) for role in Role},
            "running": sum(stage.instance is not None for stage in self.state.stages.values()),
            "holding": sum(map(len, self.homes().values())),
            "online": self.online.num_open,
            "failed": self._has_complained,
            "choices": check.num_choices if check else None,
            "starts": check.num_starts if check else None,
            "violations": check.num_violations if check else None,
            "notes": check.notes if check else [],
        }

    # What a transition means.

    def _follow(self, ts: Any, request_id: str, start: str, finish: str, worker: str) -> None:
        if start == "processing":
            self._stopped_running(ts, request_id, finish)
        if start in ("processing", "no-worker") and finish != "processing":
            self.state.withdraw(ts.key)
            self.wake()
        if start == "memory" and ts.key == prefill_key(request_id):
            self._free_kv(request_id)  # its handle is lost, and it may run elsewhere
        if finish == "waiting":
            ts.worker_restrictions = set(_PARKED)
        elif finish == "no-worker":
            self._ready.append(ts.key)
            self.wake()
        elif finish == "processing" and self.check is not None:
            self.check.verify_start(ts)
        elif finish in _ENDED:
            self._ended(ts, request_id, finish, worker)

    def _stopped_running(self, ts: Any, request_id: str, finish: str) -> None:
        stage = self.state.stages.get(ts.key)
        if stage is None or stage.instance is None:
            return
        address = stage.instance.address
        if address not in self._scheduler.workers:
            # Dask counts a suspicion when a worker goes without notice.
            self.lose(address, _VANISHED if ts.suspicious > 0 else None)
        elif finish != "memory" and ts.key == prefill_key(request_id):
            self.free_kv_at(address, request_id)

    def _ended(self, ts: Any, request_id: str, finish: str, worker: str) -> None:
        self.state.leave(ts.key)
        is_prefill = ts.key == prefill_key(request_id)
        if is_prefill and finish == "memory":
            self._homes[request_id] = worker
            self.state.hold(ts.key, worker, Facts(*ts.annotations[ANNOTATION]).prompt_tokens)
            return
        self._free_kv(request_id)
        if not is_prefill:
            self._orphans.append(prefill_key(request_id))
        self.wake()

    # KV that instances hold.

    def _free_kv(self, request_id: str) -> None:
        self.state.let_go(prefill_key(request_id))
        address = self._homes.pop(request_id, None)
        if address is not None:
            self.free_kv_at(address, request_id)

    def _rerun_prefills_of(self, address: str) -> None:
        """KV that nobody has pulled died with its worker, though Dask may hold a copy of the
        handle elsewhere and think the result safe: have the prefill run again."""
        recommendations = {}
        for request_id in [r for r, home in self._homes.items() if home == address]:
            del self._homes[request_id]
            prefill = self._scheduler.tasks.get(prefill_key(request_id))
            decode = self._scheduler.tasks.get(decode_key(request_id))
            is_waiting = decode is not None and decode.state in ("waiting", "no-worker")
            if is_waiting and prefill is not None and prefill.state == "memory":
                recommendations[prefill.key] = "released"
        self._scheduler.transitions(recommendations, stimulus_id=_stimulus())

    # The pump.

    def _pump(self) -> None:
        self._is_pump_due = False
        if self._scheduler.status is not Status.running:
            return
        try:
            self._admit()
            self._release_orphans()
            self._fail_doomed()
            self._bind()
        except Exception:
            self._complain()
            self._unpark_all()

    def _admit(self) -> None:
        ready, self._ready = self._ready, []
        for key in ready:
            ts = self._scheduler.tasks.get(key)
            if ts is None or ts.state != "no-worker":
                continue
            decode = self._scheduler.tasks.get(decode_key(request_id_of(key)))
            if decode is not None and decode.state in _ENDED:
                self._orphans.append(key)  # a prefill whose result got lost after it was of use
                continue
            stage = self.state.arrive(_stage(ts))
            if stage.is_convicted:
                text = f"{key}: {stage.losses} instances died while they ran it{self._last_loss()}"
                self._doomed.append((key, KilledInstance(text)))

    def _last_loss(self) -> str:
        losses = self.members.losses
        return f", the last on {losses[-1].address}: {losses[-1].reason}" if losses else ""

    def _bind(self) -> None:
        for instance in self.state.instances.values():
            ws = self._scheduler.workers.get(instance.address)
            instance.is_accepting = ws is not None and ws.status is Status.running
        now = time.monotonic()
        bound = []
        for role in (Role.DECODE, Role.COLOCATED, Role.PREFILL):
            while (binding := self.state.next_binding(role, now)) is not None:
                stage, instance = binding
                if self.check is not None:
                    self.check.verify_choice(stage, instance)
                if role is Role.DECODE:
                    self.state.let_go(prefill_key(request_id_of(stage.key)))
                if self.online.owns(stage.key):
                    self.online.bound(stage, instance)
                    continue
                ts = self._scheduler.tasks[stage.key]
                ts.worker_restrictions = {instance.address}
                ts.suspicious = 0  # losses are counted here, see `DispatchState`
                bound.append(stage.key)
        if not bound:
            return
        # The scheduler takes recommendations from the end.
        recommendations = dict.fromkeys(reversed(bound), "processing")
        self._scheduler.transitions(recommendations, stimulus_id=_stimulus())
        for key in bound:
            ts = self._scheduler.tasks.get(key)
            if ts is not None and ts.state == "no-worker":  # Dask sees a reason against it
                ts.worker_restrictions = set(_PARKED)
                self.state.withdraw(key)
                self._ready.append(key)

    def _release_orphans(self) -> None:
        """Let go of prefills that no decode will use, whoever holds their futures."""
        orphans, self._orphans = self._orphans, []
        for key in orphans:
            ts = self._scheduler.tasks.get(key)
            if ts is None or ts.state in _ENDED:
                continue
            # Not `stimulus_cancel`: that cancels dependents, so the finished decode's result.
            for client in [cs.client_key for cs in ts.who_wants or ()]:
                self._scheduler.client_releases_keys([key], client, _stimulus())
                self._scheduler.report(
                    {
                        "op": "cancelled-keys",
                        "keys": [key],
                        "reason": "decode-ended",
                        "msg": "The request ended without this prefill.",
                    },
                    client=client,
                )

    def _fail_doomed(self) -> None:
        doomed, self._doomed = self._doomed, []
        for key, error in doomed:
            if self.online.owns(key):
                self.online.refuse(self.state.stages[key], error)
                continue
            ts = self._scheduler.tasks.get(key)
            if ts is None or ts.state != "no-worker":
                continue
            stimulus_id = _stimulus()
            recommendations = self._scheduler.transition(
                key, "erred", exception=dumps(error), cause=key, stimulus_id=stimulus_id
            )
            self._scheduler.transitions(recommendations, stimulus_id=stimulus_id)

    # When something here fails, Dask schedules as it always does.

    def _complain(self) -> None:
        if not self._has_complained:
            self._has_complained = True
            logger.exception("dispatch failed; tasks go to any worker of their role")

    def _unpark_all(self) -> None:
        self.online.refuse_all(ClusterError("dispatch failed; see the scheduler's log"))
        recommendations = {}
        ready, self._ready = self._ready, []
        waiting = [stage.key for role in Role for stage in self.state.waiting(role)]
        for key in (*ready, *waiting):
            ts = self._scheduler.tasks.get(key)
            if ts is not None and ts.state == "no-worker":
                ts.worker_restrictions = None
                recommendations[key] = "processing"
        self._scheduler.transitions(recommendations, stimulus_id=_stimulus())


def _was_expected(scheduler: Scheduler, worker: str) -> bool:
    """Whether a worker that is being removed had been asked to leave."""
    events = [event for _, event in scheduler.get_events(worker)]
    removals = [e["expected"] for e in events if e.get("action") == "remove-worker"]
    return bool(removals and removals[-1])


def _stage(ts: Any) -> Stage:
    facts = Facts(*ts.annotations[ANNOTATION])
    role = role_of(ts.resource_restrictions)
    return Stage(
        ts.key,
        role,
        prompt_tokens=facts.prompt_tokens,
        pool_tokens=facts.pool_tokens(role),
        # The caller's priority first, then graphs as they came, then in their order.
        rank=(*ts.priority[:2], facts.position),
    )


def _stimulus() -> str:
    return f"daskserve-dispatch-{time.time()}"

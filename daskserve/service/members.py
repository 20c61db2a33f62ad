"""The scheduler's list of instances and services, and what must happen from time to time.

Workers report when they load, are ready, or failed; requests that wait for an instance that
never comes are failed here with the reason.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

from distributed import Scheduler
from distributed.scheduler import WorkerState
from tornado.ioloop import PeriodicCallback

from daskserve.config import ServiceSettings
from daskserve.core.instance import Role
from daskserve.errors import ClusterError, DaskserveError, ModelError, NeverFits
from daskserve.service.agreement import unlike
from daskserve.service.dispatch_state import DispatchState, InstanceState, Stage
from daskserve.service.draining import Draining
from daskserve.service.flipping import Flipping
from daskserve.service.meetings import Meetings
from daskserve.service.names import (
    ATTACH,
    CLOCK,
    DETACH,
    DISPATCH_PLUGIN,
    FIND_GROUP,
    INSTANCE_PLUGIN,
    KEEP_KV,
    ONLINE,
    OPEN_GROUP,
    REPORT,
    STATUS,
    role_of,
    roles_of,
)
from daskserve.service.observing import Observations
from daskserve.service.online_dispatch import OnlineDispatch

logger = logging.getLogger(__name__)

_TICK_S = 0.25
_LOSSES_KEPT = 50
CLIENT_GRACE_S = 30.0
"""A client that lost its connection may come back within this time."""

LOADING, READY, FAILED, LOST = "loading", "ready", "failed", "lost"
"""What a worker reports of its instance."""


@dataclass(frozen=True, slots=True)
class Report:
    """What a worker says of its instance.

    ``instance`` is its name, ``info`` holds the fields of ``InstanceInfo`` once it is ready,
    ``error`` the reason of a failure.
    """

    status: str
    role: str
    slots: int
    config_id: str
    instance: str = ""
    info: dict[str, Any] = field(default_factory=dict)
    error: str = ""


@dataclass(frozen=True, slots=True)
class Loss:
    """An instance that went without notice, and why as far as it is known."""

    address: str
    role: str
    reason: str


class Dispatch(Protocol):
    """What the members ask of the dispatch plugin."""

    state: DispatchState
    online: OnlineDispatch

    def wake(self) -> None: ...
    def lose(self, address: str, reason: str | None) -> None: ...
    def doom(self, stages: list[Stage], error: DaskserveError) -> None: ...
    def homes(self) -> dict[str, list[str]]: ...
    def describe(self) -> dict[str, Any]: ...


class Members:
    """Instances by address and attached services, with the handlers they call.

    Parameters
    ----------
    scheduler
        Gets handlers, named after us, and one periodic callback.
    settings
        Waiting times.
    dispatch
        Told about instances that come and go.
    """

    def __init__(self, scheduler: Scheduler, settings: ServiceSettings, dispatch: Dispatch) -> None:
        self._scheduler = scheduler
        self._settings = settings
        self._dispatch = dispatch
        self._meetings = Meetings()
        self._draining = Draining(scheduler, dispatch, self._address_of)
        self._flipping = Flipping(scheduler, dispatch, self._flipped)
        self._handlers = {
            STATUS: self._status,
            CLOCK: self._clock,
            ATTACH: self._attach,
            DETACH: self._detach,
            ONLINE: dispatch.online.serve,
            OPEN_GROUP: self._meetings.open,
            FIND_GROUP: self._meetings.find,
            **self._draining.handlers,
            **self._flipping.handlers,
        }
        self.observations = Observations(scheduler, lambda: dispatch.state, lambda: self._reports)
        self._reports: dict[str, Report] = {}
        self.losses: deque[Loss] = deque(maxlen=_LOSSES_KEPT)
        """The last instances that were lost, the latest at the end."""
        self._clients: dict[str, str] = {}  # of every attached service
        self._absent_since: dict[str, float] = {}  # clients that are away
        self._missing_since: dict[Role, float] = {}
        self._kept_at = time.monotonic()
        self._tick_callback = PeriodicCallback(self._tick, _TICK_S * 1000)

    def start(self) -> None:
        self._scheduler.handlers.update(self._handlers)
        self._scheduler.stream_handlers[REPORT] = self._on_report
        self.observations.start()
        self._scheduler.periodic_callbacks[DISPATCH_PLUGIN] = self._tick_callback
        self._tick_callback.start()

    def stop(self) -> None:
        self._tick_callback.stop()

    async def _uninstall(self) -> None:
        """The last service has left: the instances go, and we with them."""
        try:
            if INSTANCE_PLUGIN in self._scheduler.worker_plugins:
                await self._scheduler.unregister_worker_plugin(None, INSTANCE_PLUGIN)
        except OSError as error:
            logger.warning("a worker left while its instance was to be closed: %s", error)
        if self._clients:
            return  # another service has come meanwhile
        self.stop()
        self.observations.stop()
        # The stream handler stays: a late report would otherwise cut a worker off.
        for name in self._handlers:
            self._scheduler.handlers.pop(name, None)
        self._scheduler.periodic_callbacks.pop(DISPATCH_PLUGIN, None)
        self._scheduler.remove_plugin(DISPATCH_PLUGIN)

    def forget(self, address: str, reason: str | None) -> None:
        """An instance is gone; the reason, unless it was asked to go."""
        report = self._reports.pop(address, None)
        if reason is not None and report is not None and report.status == READY:
            self.losses.append(Loss(address, report.role, reason))
        self._meetings.forget(address)
        self._draining.forget(address)
        self.observations.forget(address)

    def clear(self) -> None:
        self._reports.clear()
        self._missing_since.clear()

    # Handlers. Async, so that they run in the scheduler's event loop.

    async def _status(self) -> dict[str, Any]:
        instances = [
            {
                "address": address,
                "status": report.status,
                "role": report.role,
                "slots": report.slots,
                "config_id": report.config_id,
                "instance": report.instance,
                "info": report.info,
                "error": report.error,
                "is_draining": self._is_draining(address),
            }
            for address, report in self._reports.items()
        ]
        workers = self._scheduler.workers.values()
        roles = {ws.address: self._role_of(ws) for ws in workers}
        possible = {role.value for ws in workers for role in roles_of(ws.resources)}
        return {
            "workers": {address: role for address, role in roles.items() if role},
            "roles": sorted(possible),
            "instances": instances,
            "losses": [asdict(loss) for loss in self.losses],
            "dispatch": self._dispatch.describe(),
        }

    def _role_of(self, worker: WorkerState) -> str | None:
        report = self._reports.get(worker.address)
        if report is not None:
            return report.role
        role = role_of(worker.resources)
        return role.value if role else None

    def _flipped(self, address: str, said: dict[str, Any]) -> None:
        if address in self._reports:
            self._reports[address] = replace(self._reports[address], **said)

    def _address_of(self, instance: str) -> str | None:
        named = (a for a, report in self._reports.items() if report.instance == instance)
        return next(named, None)

    def _is_draining(self, address: str) -> bool:
        instance = self._dispatch.state.instances.get(address)
        return instance is not None and instance.is_draining

    async def _clock(self) -> float:
        return time.monotonic()

    async def _attach(self, service: str, client: str, slo: dict[str, float] | None = None) -> None:
        self._clients[service] = client
        self.observations.attached(service, slo)

    async def _detach(self, service: str) -> None:
        self.observations.detached(service)
        if self._clients.pop(service, None) is not None and not self._clients:
            await self._uninstall()

    def _on_report(self, report: dict[str, Any], worker: str, **kwargs: Any) -> None:
        said = Report(**report)
        if worker not in self._scheduler.workers:
            return
        if said.status == LOST:
            self._dispatch.lose(worker, said.error)
        elif said.status == READY and (
            error := self._unlike_others(said) or self._of_other_model(worker, said)
        ):
            said = replace(said, status=FAILED, error=error)
        self._reports[worker] = said
        if said.status == READY:
            self._dispatch.state.add_instance(
                InstanceState(
                    address=worker,
                    role=Role(said.role),
                    slots=said.slots,
                    num_blocks=said.info["num_kv_blocks"],
                    block_size=said.info["block_size"],
                    is_draining=self._draining.is_leaving(worker),
                )
            )
        self._dispatch.wake()

    def _of_other_model(self, worker: str, said: Report) -> str:
        ready = {a: r.info for a, r in self._reports.items() if r.status == READY and a != worker}
        difference = unlike(said.info, ready)
        return f"its model is not that of the other instances: {difference}" if difference else ""

    def _unlike_others(self, said: Report) -> str | None:
        """Why no KV could go between this instance and those that are ready; None if it can."""
        if said.role == Role.COLOCATED.value:
            return None
        for address, report in self._reports.items():
            theirs, own = report.info.get("kv_layout"), said.info["kv_layout"]
            if report.status == READY and theirs != own:
                return (
                    f"it keeps its KV as {own}, the {report.role} instance on {address} as {theirs}"
                )
        return None

    # From time to time.

    async def _tick(self) -> None:
        now = time.monotonic()
        self._dispatch.state.end_probations(now)
        for role in Role:
            if self._dispatch.state.num_waiting(role):
                self._look_after(role, now)
            else:
                self._missing_since.pop(role, None)
        self._dispatch.wake()  # a paused worker may have come back
        if now - self._kept_at >= self._settings.lease_renewal_s:
            self._kept_at = now
            self._keep_kv()
        if self._scheduler.no_workers_timeout is not None:
            self._renew_parked(now)
        if self._forget_killed_clients(now):
            await self._uninstall()

    def _forget_killed_clients(self, now: float) -> bool:
        """Services whose process died never say so; True when the last one is gone."""
        absent = set(self._clients.values()) - self._scheduler.clients.keys()
        self._absent_since = {c: self._absent_since.get(c, now) for c in absent}
        gone = {c for c, since in self._absent_since.items() if now - since > CLIENT_GRACE_S}
        for service in [s for s, c in self._clients.items() if c in gone]:
            del self._clients[service]
            self.observations.detached(service)
        return bool(gone) and not self._clients

    def _look_after(self, role: Role, now: float) -> None:
        """Fail what waits for an instance that will not come."""
        of_role = {a: r for a, r in self._reports.items() if r.role == role.value}
        waiting = self._dispatch.state.waiting(role)
        instances = self._dispatch.state.instances_of(role)
        if any(report.status == LOADING for report in of_role.values()):
            self._missing_since.pop(role, None)
        elif instances:
            self._missing_since.pop(role, None)
            self._refuse_too_large(waiting[0], instances)
        elif failed := {a: r.error for a, r in of_role.items() if r.status == FAILED}:
            address, error = next(iter(failed.items()))
            text = f"no {role.value} instance could load its model; {address}: {error}"
            self._dispatch.doom(waiting, ModelError(text))
        elif now - self._missing_since.setdefault(role, now) > self._settings.no_instance_timeout_s:
            text = f"no {role.value} instance for {self._settings.no_instance_timeout_s:g} s; "
            workers = self._scheduler.workers.values()
            silent = [ws.address for ws in workers if self._role_of(ws) == role.value]
            if silent:
                text += f"{silent[0]} should run one; see its log, and its version of daskserve"
            else:
                text += f"start a worker with --resources {role.value}=<slots>"
            self._dispatch.doom(waiting, ClusterError(text))

    def _refuse_too_large(self, stage: Stage, instances: list[InstanceState]) -> None:
        # The largest instance may have gone since the request was accepted.
        if all(stage.blocks_on(instance) > instance.num_blocks for instance in instances):
            largest = max(instance.num_blocks for instance in instances)
            needed = stage.blocks_on(instances[0])
            text = f"the request needs {needed} KV blocks, the largest instance has {largest}"
            self._dispatch.doom([stage], NeverFits(text))

    def _keep_kv(self) -> None:
        for address, request_ids in self._dispatch.homes().items():
            if address in self._scheduler.workers:
                message = {"op": KEEP_KV, "request_ids": request_ids}
                self._scheduler.worker_send(address, message)

    def _renew_parked(self, now: float) -> None:
        """Parked tasks wait for room, not for workers: keep Dask's own time-out off them."""
        for role in Role:
            for stage in self._dispatch.state.waiting(role):
                ts = self._scheduler.tasks.get(stage.key)
                if ts is not None and self._scheduler.unrunnable.pop(ts, None) is not None:
                    self._scheduler.unrunnable[ts] = now

"""A service's place on a scheduler: plugins in, instances ready, and out again at the end."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any
from uuid import uuid4

from distributed import Client

from daskserve.config import ServiceSettings
from daskserve.core.instance import EngineConfig, InstanceInfo, InstanceLoad, Role
from daskserve.core.slo import SLO
from daskserve.errors import ClusterError, ModelError
from daskserve.observe import JobProgress, Snapshot
from daskserve.service.clock import clock_offset_s
from daskserve.service.dispatch import DispatchPlugin
from daskserve.service.instance_plugin import InstancePlugin, config_id
from daskserve.service.joining import Expected, await_placement, check_versions
from daskserve.service.kv_counters import Pulled
from daskserve.service.members import FAILED, READY
from daskserve.service.names import (
    ATTACH,
    CLOCK,
    DETACH,
    DRAIN,
    FLIP,
    KV_PULLED,
    LOAD,
    NOTE_DECISION,
    NOTE_JOB,
    OBSERVE,
    RESUME,
    STATUS,
)

logger = logging.getLogger(__name__)

_POLL_S = 0.05
_SAY_S = 10.0


@dataclass(frozen=True, slots=True)
class AddressedInstance:
    """A ready instance and the Dask worker it lives on."""

    address: str
    info: InstanceInfo

    def __getattr__(self, name: str) -> Any:
        return getattr(self.info, name)


class Connection:
    """Installs what a service needs on a scheduler, and nothing global.

    Parameters
    ----------
    client
        Of the scheduler.
    config
        Engine of the instances; services on one scheduler share them, so it must be the same.
    settings
        Time limits.
    slo
        Limits that whoever watches the scheduler shows; None has none.
    expected
        Engines of single instances, and what must be there.
    """

    def __init__(
        self,
        client: Client,
        config: EngineConfig,
        settings: ServiceSettings,
        slo: SLO | None = None,
        expected: Expected | None = None,
    ) -> None:
        self._client = client
        self._config = config
        self._settings = settings
        self._slo = asdict(slo) if slo is not None else None
        self._expected = expected or Expected()
        self._service_id = uuid4().hex
        self._is_attached = False
        self.clock_offset_s = 0.0
        """Add to this process's monotonic clock to get the scheduler's."""
        self.instances: list[AddressedInstance] = []
        """Ready instances as of the last look; some may be away."""
        self.is_colocated = False
        """Whether requests run on colocated instances: without prefill and decode workers."""

    async def open(self) -> None:
        """Install the plugins and wait until every worker with a role has its instance.

        Raises
        ------
        ClusterError
            The client is closed, roles or ranks of the placement are missing, another version of
            daskserve is over there, or it takes too long.
        ModelError
            An instance could not load its model.
        """
        if self._client.status != "running":
            raise ClusterError(f"the Dask client is {self._client.status}")
        say, timeout_s = self._expected.say, self._settings.start_timeout_s
        await check_versions(self._client, say)
        if self._expected.placement is not None:
            await await_placement(self._client, self._expected.placement, timeout_s, say)
        await self._install(DispatchPlugin(self._settings))
        await self._rpc(ATTACH, service=self._service_id, client=self._client.id, slo=self._slo)
        self._is_attached = True
        self.is_colocated = _is_colocated((await self._rpc(STATUS))["roles"])
        await self._install(InstancePlugin(self._config, self._settings, self._expected.configs))
        await self._wait_until_ready()
        self.clock_offset_s = await clock_offset_s(getattr(self._client.scheduler, CLOCK))

    def check(self) -> None:
        """ClusterError when the service was closed, or its scheduler is gone."""
        if not self._is_attached or self._client.status != "running":
            raise ClusterError("the service is closed, or the Dask scheduler is gone")

    async def refresh(self) -> dict[str, Any]:
        """Look at the instances again; returns the scheduler's status (ClusterError)."""
        self.check()
        status = await self._rpc(STATUS)
        self.instances = [
            AddressedInstance(
                report["address"], InstanceInfo(**{**report["info"], "role": Role(report["role"])})
            )
            for report in status["instances"]
            if report["status"] == READY
        ]
        return status

    async def load(self) -> dict[str, InstanceLoad]:
        """Counters of every ready instance by address."""
        await self.refresh()
        answers = await self._client.scheduler.broadcast(
            msg={"op": LOAD}, workers=[i.address for i in self.instances], on_error="ignore"
        )
        return {a: InstanceLoad(**counters) for a, counters in answers.items() if counters}

    async def drain(self, instances: Sequence[str]) -> dict[str, bool]:
        """Have instances get nothing new; whether each is drained by now."""
        self.check()
        return await self._rpc(DRAIN, instances=list(instances))

    async def flip(self, instance: str, role: Role, timeout_s: float) -> dict[str, float]:
        """Have an instance take another role, see `daskserve.service.flipping`."""
        self.check()
        return await self._rpc(FLIP, instance=instance, role=role.value, timeout_s=timeout_s)

    async def resume(self, instance: str) -> None:
        """Have an instance take requests again."""
        self.check()
        await self._rpc(RESUME, instance=instance)

    async def observe(self, cursor: int = 0, num_decisions: int = 0) -> Snapshot:
        """What the scheduler knows of instances and finished requests (ClusterError)."""
        self.check()
        record = await self._rpc(OBSERVE, cursor=cursor, num_decisions=num_decisions)
        return Snapshot.from_record(record)

    async def note_job(self, job: JobProgress) -> None:
        """Tell those who watch how far a batch job is; no job fails because nobody heard."""
        try:
            self.check()
            await self._rpc(NOTE_JOB, job=job.to_record())
        except Exception as error:
            logger.debug("the progress of %s was not told: %r", job.name, error)

    async def note_decision(self, decision: dict[str, Any]) -> None:
        """Tell those who watch of a decision of the replanner, as its `to_json` has it."""
        self.check()
        await self._rpc(NOTE_DECISION, decision=decision)

    async def kv_pulled(self) -> dict[str, dict[str, Pulled]]:
        """What every rank has pulled by holder, both by address."""
        self.check()
        answers = await self._client.scheduler.broadcast(msg={"op": KV_PULLED}, on_error="ignore")
        return {
            rank: {holder: Pulled(*counts) for holder, counts in of_holder.items()}
            for rank, of_holder in answers.items()
            if isinstance(of_holder, dict)
        }

    async def close(self) -> None:
        """Leave the scheduler; the last service takes the plugins, and so the models, with it."""
        if self._is_attached and self._client.status == "running":
            self._is_attached = False
            try:
                await self._rpc(DETACH, service=self._service_id)
            except OSError as error:  # the scheduler is going too
                logger.warning("leaving the scheduler failed: %s", error)

    async def _rpc(self, name: str, **kwargs: Any) -> Any:
        return await getattr(self._client.scheduler, name)(**kwargs)

    async def _install(self, plugin: DispatchPlugin | InstancePlugin) -> None:
        try:
            await self._client.register_plugin(plugin)
        except Exception as error:  # whatever another version, or none, leads to over there
            raise ClusterError(
                f"the scheduler or a worker cannot run daskserve ({type(error).__name__}: {error});"
                " install the same version there"
            ) from error

    async def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + self._settings.start_timeout_s
        say_at = time.monotonic() + _SAY_S
        while True:
            status = await self.refresh()
            self._check_reports(status["instances"])
            missing = set(status["workers"]) - {i.address for i in self.instances}
            if not missing:
                self._check_roles()
                return
            if time.monotonic() > say_at:
                left_s = deadline - time.monotonic()
                self._expected.say(
                    f"waiting for the instances on {', '.join(sorted(missing))} to load, up to"
                    f" {left_s:.0f} s"
                )
                say_at += _SAY_S
            if time.monotonic() > deadline:
                raise ClusterError(
                    f"no instance on {', '.join(sorted(missing))} after"
                    f" {self._settings.start_timeout_s:g} s (setting service.start-timeout-s)"
                    + "".join(_waiting(status["instances"]))
                )
            await asyncio.sleep(_POLL_S)

    def _check_roles(self) -> None:
        """Workers that can have either role must not all start with the same."""
        roles = {instance.info.role for instance in self.instances}
        if not self.is_colocated and not {Role.PREFILL, Role.DECODE} <= roles:
            found = ", ".join(sorted(role.value for role in roles)) or "none"
            raise ClusterError(
                f"every instance starts as {found}: name the other role first in the resources of"
                ' some workers, as in --resources "DECODE=<slots> PREFILL=<slots>"'
            )

    def _check_reports(self, reports: list[dict[str, Any]]) -> None:
        for report in reports:
            if report["status"] == FAILED:
                raise ModelError(
                    f"{report['role']} instance on {report['address']}: {report['error']}"
                )
            config = self._expected.configs.get(report["instance"], self._config)
            if report["config_id"] != config_id(config):
                raise ClusterError(
                    f"{report['address']} already runs an instance with another EngineConfig"
                    f" ({_difference(report['info'], config)}); close the service that"
                    " started it or use the same config"
                )


def _waiting(reports: list[dict[str, Any]]) -> list[str]:
    return [f"; {r['address']}: {r['error']}" for r in reports if r["error"]]


def _difference(info: dict[str, Any], config: EngineConfig) -> str:
    """In what an instance keeps its KV differently, so that none can go between it and ours."""
    for name in ("model", "dtype", "block_size"):
        theirs, ours = info.get(name, "loading"), getattr(config, name)
        if theirs != ours:
            return f"{name}={theirs} there, {name}={ours} here"
    return f"the same model {config.model}, other limits"


def _is_colocated(roles: Sequence[str]) -> bool:
    if {Role.PREFILL.value, Role.DECODE.value} <= set(roles):
        return False
    if Role.COLOCATED.value in roles:
        return True
    found = ", ".join(sorted(roles)) or "none"
    raise ClusterError(
        "the cluster needs workers with the resources PREFILL and DECODE, or COLOCATED"
        f" (found: {found}); start them with: dask worker <scheduler> --nthreads <slots>"
        ' --resources "DECODE=<slots>"'
    )

"""The worker's side: an engine on every worker that carries a role as a Dask resource.

The only module that knows both Dask and the engine. The plugin loads the instance beside the
running worker, reports to the scheduler, answers KV pulls, and aborts what Dask cancels.
"""

from __future__ import annotations

import asyncio
import gc
import hashlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from distributed import Worker
from distributed.core import Status
from distributed.diagnostics.plugin import WorkerPlugin

from daskserve.config import RankSettings, ServiceSettings, settings
from daskserve.core.instance import EngineConfig, Role
from daskserve.core.kv import KVHandle
from daskserve.core.request import TokenDelta
from daskserve.core.shards import Shard
from daskserve.errors import ConfigError, DaskserveError, InstanceLost, KVUnavailable
from daskserve.service.clock import clock_offset_s
from daskserve.service.follower import FollowerRank
from daskserve.service.head import HeadRank, shape_of
from daskserve.service.kv_counters import KVCounters
from daskserve.service.kv_parts import (
    Limits,
    PinServer,
    all_of,
    ask_to_pull,
    export_part,
    pull_parts,
    release_kv,
)
from daskserve.service.kv_pull import OPERATION, KVServer, Views, pull
from daskserve.service.leaving import Leaving
from daskserve.service.members import FAILED, LOADING, LOST, READY, Report
from daskserve.service.names import (
    BECOME,
    CLOCK,
    FREE_KV,
    INSTANCE_PLUGIN,
    KEEP_KV,
    KV_PULLED,
    LOAD,
    ONLINE,
    PIN_KV,
    RELEASE_KV,
    REPORT,
    request_id_of,
    roles_of,
)
from daskserve.service.online_worker import OnlineServer
from daskserve.service.reporting import Reporter
from daskserve.service.token_sender import TokenSenders

if TYPE_CHECKING:
    from daskserve.workers.instance import Instance
    from daskserve.workers.loading import LoadModel
    from daskserve.workers.pulling import Destination

logger = logging.getLogger(__name__)

_LOADING_GRACE_S = 2.0
_CLOCK_RETRY_S = 1.0


class InstancePlugin(WorkerPlugin):
    """Runs one instance on the worker, or one rank of it; does nothing on workers that are neither.

    Parameters
    ----------
    config
        The engine to build.
    settings
        Time limits of KV pulls.
    configs
        Engines of single instances by name, where they are not like ``config``.
    """

    name = INSTANCE_PLUGIN
    idempotent = True

    def __init__(
        self,
        config: EngineConfig,
        settings: ServiceSettings,
        configs: Mapping[str, EngineConfig],
    ) -> None:
        self._config = config
        self._configs = configs
        self._settings = settings
        self._instance: Instance | None = None
        self._follower: FollowerRank | None = None
        self._leaving: Leaving | None = None
        self._head: HeadRank | None = None
        self._pins: PinServer | None = None

    async def setup(self, worker: Worker) -> None:
        self._worker = worker
        self._roles = roles_of(worker.state.total_resources)
        place = settings().rank
        self._role = next(iter(self._roles), None)
        _check_place(place, self._role)
        self._name = place.instance or ""
        self._config = self._configs.get(self._name, self._config)
        if self._role is None and place.number == 0:
            return
        is_head = self._role is not None
        self._leaving = Leaving(worker, self._name or self.address, is_head, settings().drain)
        self._leaving.start()
        if not is_head:
            self._follower = FollowerRank(
                worker, place, self._config, self._settings, self._leaving
            )
            self._follower.start()
            return
        if shape_of(place).num_gpus > 1:
            self._head = HeadRank(worker, place, self._settings, self._role, self._lose_from_thread)
        self._tokens = TokenSenders(worker.security)
        self._online = OnlineServer(self, self._settings.link_silence_s)
        self._is_over = False
        self._reporter = Reporter(worker, place, self._config.device)
        self._counters = KVCounters()
        worker.handlers[LOAD] = self._load_counters
        worker.handlers[BECOME] = self._become
        worker.handlers[KV_PULLED] = self._counters.report
        worker.handlers[ONLINE] = self._online.serve
        worker.stream_handlers[FREE_KV] = self.abort
        worker.stream_handlers[KEEP_KV] = self._keep_kv
        self._report(LOADING)
        # Beside the worker's start: a large model takes longer than Dask waits for a worker.
        self._loading = asyncio.create_task(self._load())

    async def teardown(self, worker: Worker) -> None:
        if self._leaving is not None:
            self._leaving.close()
        if self._follower is not None:
            await self._follower.close()
        if self._role is None:
            return
        self._is_over = True
        self._reporter.close()
        # Before anything is awaited: another service's plugin may put in its own meanwhile.
        for name in (LOAD, KV_PULLED, BECOME, ONLINE, OPERATION, PIN_KV, RELEASE_KV):
            worker.handlers.pop(name, None)
        if self._pins is not None:
            self._pins.close()
        if self._head is not None:
            self._head.call_off()
        # A model that is still loading cannot be stopped: it closes itself once it is there.
        await asyncio.wait([self._loading], timeout=_LOADING_GRACE_S)
        self._online.close()
        await self._tokens.close()
        if self._instance is not None:
            await self._instance.close()
            self._instance = None
            if self._head is not None:
                await asyncio.to_thread(self._head.close)
            if worker.status is Status.running:  # it lives on without us: give the memory back
                gc.unfreeze()
                gc.collect()

    def transition(self, key: Any, start: str, finish: str, **kwargs: Any) -> None:
        """Dask lets a cancelled coroutine run on; here its request is aborted."""
        if start == "executing" and finish == "released" and self._instance is not None:
            request_id = request_id_of(key)
            if request_id is not None:
                self._instance.abort(request_id)

    # For tasks and online requests.

    @property
    def address(self) -> str:
        return self._worker.contact_address or self._worker.address

    async def instance(self) -> Instance:
        """The engine, once it is loaded; InstanceLost when it never will be."""
        if self._instance is None:
            await asyncio.wait([self._loading], timeout=self._settings.start_timeout_s)
            if self._instance is None:
                raise InstanceLost(f"{self._worker.address} has no instance")
        return self._instance

    def abort(self, request_id: str) -> None:
        """Give up a request in whatever state, and its KV."""
        if self._instance is not None:
            self._instance.abort(request_id)

    def is_cancelled(self, key: str) -> bool:
        """Whether Dask cancelled a task before its coroutine began."""
        ts = self._worker.state.tasks.get(key)
        return ts is None or ts.state == "cancelled"

    async def pull(self, handle: KVHandle, destination: Destination) -> int | None:
        """Fetch the KV of a prefill into pages of this instance (KVUnavailable)."""
        followers = self._instance.engine.holding.followers
        if handle.ranks or followers:
            return await self._pull_parts(handle, destination, followers)
        await pull(
            self._worker.rpc,
            handle,
            destination.views,
            connect_timeout_s=self._settings.pull_connect_timeout_s,
            stall_timeout_s=self._settings.pull_stall_timeout_s,
            counters=self._counters,
        )
        return None

    async def _pull_parts(
        self, handle: KVHandle, destination: Destination, followers: tuple[str, ...]
    ) -> int:
        """Every rank fetches its layers and heads at once; the digest of all of them."""
        limits, pages = self._limits, destination.pages
        connections, shape = self._worker.rpc, self._instance.engine.runner.shape
        (_, own), *others = await all_of(
            [
                pull_parts(
                    connections,
                    handle,
                    destination.pool,
                    shape,
                    len(pages),
                    limits,
                    pages,
                    self._counters,
                ),
                *(
                    ask_to_pull(connections, address, handle, destination.owner, len(pages), limits)
                    for address in followers
                ),
            ]
        )
        await release_kv(connections, handle, limits.connect_s)
        return (own + sum(others)) % 2**64

    @property
    def _limits(self) -> Limits:
        timings = self._settings
        return Limits(
            timings.pull_connect_timeout_s,
            timings.pull_stall_timeout_s,
            self._config.kv_pull_timeout_s,
        )

    def on_token(self, token_sink: str | None) -> Callable[[TokenDelta], None] | None:
        """Where the tokens of a request go as they come; None when nobody listens."""
        return None if token_sink is None else self._tokens.to(token_sink)

    def lose(self, error: InstanceLost) -> None:
        """The engine died: have the worker process replaced, with all that runs on it."""
        if self._is_over:
            return
        self._is_over = True
        logger.error("the instance on %s is lost: %s", self._worker.address, error)
        self._report(LOST, error=str(error))
        self._worker.loop.add_callback(
            self._worker.close,
            nanny=self._leaving.has_begun,
            executor_wait=False,
            reason="daskserve-instance-lost",
        )

    def _lose_from_thread(self, error: InstanceLost) -> None:
        self._worker.loop.add_callback(self.lose, error)

    async def _load(self) -> None:
        try:
            load = None
            if self._head is not None:
                load = await self._head.open(self._config)
                self._report(LOADING, error="it waits for the other ranks of its instance")
            instance = await asyncio.to_thread(_build, self._role, self._config, load)
        except InstanceLost as error:  # a rank that went while it loaded comes back
            self.lose(error)
            return
        except Exception as error:
            is_ours = isinstance(error, DaskserveError)
            text = str(error) if is_ours else f"{type(error).__name__}: {error}"
            logger.error("the instance on %s failed to load: %s", self._worker.address, text)
            if not self._is_over:
                self._report(FAILED, error=text)
            return
        instance.clock_offset_s = await self._clock_offset_s()
        if self._is_over:
            await instance.close()
            return
        self._instance = instance
        self._reporter.watch(instance)
        if Role.PREFILL in self._roles:
            stall_s = self._settings.pull_stall_timeout_s
            server = KVServer(
                self.address, self._export_kv, self._release_kv, stall_s, self._export_part
            )
            self._pins = PinServer(self.address, instance)
            self._worker.handlers |= {
                OPERATION: server.handle,
                PIN_KV: self._pins.pin,
                RELEASE_KV: self._pins.release,
            }
        self._report(READY, info=asdict(instance.info))

    async def _clock_offset_s(self) -> float:
        """However long the scheduler takes to answer: nobody would load the model once more."""
        while not self._is_over:
            try:
                return await clock_offset_s(getattr(self._worker.scheduler, CLOCK))
            except Exception as error:
                logger.warning("the scheduler's clock cannot be read: %r", error)
                await asyncio.sleep(_CLOCK_RETRY_S)
        return 0.0

    def _report(self, status: str, info: dict[str, Any] | None = None, error: str = "") -> None:
        report = Report(
            status=status,
            role=self._role.value,
            slots=_num_slots(self._worker, self._role),
            config_id=config_id(self._config),
            instance=self._name,
            info=info or {},
            error=error,
        )
        self._worker.batched_send({"op": REPORT, "report": asdict(report)})

    # Handlers.

    async def _load_counters(self) -> dict[str, int]:
        return asdict(self._instance.load()) if self._instance is not None else {}

    async def _become(self, role: str) -> dict[str, Any]:
        """Take another role (empty while the old one has work): its slots, and the new info."""
        instance = await self.instance()
        new = Role(role)
        if new not in self._roles or not await instance.become(new):
            return {}
        self._role = new
        return {"slots": _num_slots(self._worker, new), "info": asdict(instance.info)}

    # Not the instance's own methods: Dask never forgets a handler, and with it the weights.

    def _export_kv(self, handle: KVHandle) -> Views:
        if self._instance is None:
            raise KVUnavailable(f"the instance on {self.address} is closed")
        return self._instance.export(handle)

    async def _export_part(self, handle: KVHandle, shard: Shard) -> tuple[Views, int]:
        if self._instance is None:
            raise KVUnavailable(f"the instance on {self.address} is closed")
        pages, digest = self._instance.pin_part(handle, shard)
        return export_part(self._instance.engine.pool, pages, shard), digest

    def _release_kv(self, request_id: str, secret: bytes) -> None:
        if self._instance is not None:
            self._instance.release(request_id, secret)

    def _keep_kv(self, request_ids: list[str]) -> None:
        if self._instance is not None:
            self._instance.keep(request_ids)


def _num_slots(worker: Worker, role: Role) -> int:
    """Tasks that Dask runs at once on the worker: one per unit of the role and per thread."""
    units = int(worker.state.total_resources[role.value])
    return max(min(units, worker.state.nthreads), 1)


def config_id(config: EngineConfig) -> str:
    """Tells configurations apart: services on one scheduler share its instances."""
    return hashlib.sha256(repr(config).encode()).hexdigest()[:16]


def _check_place(place: RankSettings, role: Role | None) -> None:
    if place.number > 0 and role is not None:
        raise ConfigError(
            f"daskserve.rank.number={place.number} of {place.instance} must carry no resource"
            f" {role.value}: only rank 0 takes requests"
        )


def _build(role: Role, config: EngineConfig, load: LoadModel | None) -> Instance:
    # Here, so that neither the scheduler nor the client imports torch.
    from daskserve.workers.instance import Instance
    from daskserve.workers.loading import load_model

    instance = Instance(role, config, load or load_model)
    instance.start()
    # What was imported lives as long as the process: walking it in every collection, and once
    # more at exit, costs a second.
    gc.collect()
    gc.freeze()
    return instance

"""A cluster of our own on this machine: one process and its own cores per instance."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Mapping, Sequence
from multiprocessing import resource_tracker
from typing import Any

from distributed import Nanny, Scheduler, SpecCluster, Worker
from distributed.comm.registry import get_backend
from distributed.diagnostics.plugin import WorkerPlugin

from daskserve.config import ServiceSettings
from daskserve.core.instance import EngineConfig, Role
from daskserve.core.placement import Parallelism
from daskserve.errors import ConfigError
from daskserve.service.cards import Cards, require_dask_cuda

HOST = "127.0.0.1"
WORKER_TTL = "30s"
"""Without a heartbeat for so long a worker is replaced; loading a model must not take it up."""

_TTL_LOOK_S = 1.0
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")

# When a rank dies torch's C++ prints a stack trace per connection; our errors say who it was.
_QUIET = {"TORCH_CPP_LOG_LEVEL": "ERROR"}

_MAPPINGS = ("config", "env")

Cores = Sequence[Sequence[int]] | str | None
Instances = int | Sequence[Parallelism]
"""How many instances of one worker each, or the shape of every instance."""


class CoreAffinity(WorkerPlugin):
    """Keeps a worker process, its later threads included, on its cores."""

    name = "daskserve-core-affinity"

    def __init__(self, cores: Sequence[int]) -> None:
        self._cores = cores

    def setup(self, worker: Worker) -> None:
        # Threads that run already do not follow the process: move each of them.
        for thread in os.listdir("/proc/self/task"):
            os.sched_setaffinity(int(thread), self._cores)


class OwnCluster(SpecCluster):
    """Leaves the restart of a worker to its nanny, however often it dies.

    SpecCluster looks once, some time after a loss, and closes the nanny for good when its worker
    is away at that moment, though it may be on its way up for the second time.
    """

    async def _start(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            # Ctrl-C in a terminal reaches every process of the group. It is for the one that
            # asked for the cluster and closes it: processes started from this thread inherit
            # its mask. The tracker comes first, since starting it unblocks the signal.
            resource_tracker.ensure_running()
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        await super()._start()
        # Dask looks once per time-out, so that a stopped worker could be missed for two of them.
        look = self.scheduler.periodic_callbacks["worker-ttl"]
        look.stop()
        look.callback_time = _TTL_LOOK_S * 1000
        look.start()

    def _update_worker_status(self, op: str, msg: Any) -> None:
        super(SpecCluster, self)._update_worker_status(op, msg)


def local_cluster(
    instances: Mapping[Role, Instances],
    config: EngineConfig,
    settings: ServiceSettings,
    cores: Cores,
    is_flippable: bool,
    asynchronous: bool,
    configs: Mapping[str, EngineConfig],
    cards: Cards | None = None,
) -> OwnCluster:
    """Scheduler and workers on loopback, dashboard off unless an address is set.

    Start it under `own_cluster_config`.

    Parameters
    ----------
    instances
        How many of each role, or their shapes; every rank is a process.
    cores
        ``"auto"`` shares this process's cores out, a list gives each rank its own (prefill
        first, then decode, then colocated), None binds to none.
    is_flippable
        Prefill and decode instances can take each other's role.
    asynchronous
        For use inside a running event loop.
    configs
        By name (``decode-1``) the engines that are not like ``config``.
    cards
        The GPUs of the ranks; None: they run on the CPU.

    Raises
    ------
    ConfigError
        Nothing to start, a list of cores that does not match, or a protocol that Dask does not
        have here.
    """
    _check_protocol(settings.protocol)
    shapes = _checked_shapes(instances)
    shares = iter(_share(cores, sum(shape.num_gpus for _, shape in shapes)))
    workers: dict[str, Any] = {}
    for index, (role, shape) in enumerate(shapes):
        name = f"{role.value.lower()}-{index}"
        own = [next(shares) for _ in range(shape.num_gpus)]
        engine = configs.get(name, config)
        workers |= instance_workers(name, role, shape, engine, settings, own, is_flippable)
    scheduler = _scheduler(settings.protocol, settings.dashboard_address)
    if cards is not None and cards.most_on_one == 1 and cards.protocol == "ucx":
        require_dask_cuda()
        from daskserve.service.local_cuda import OwnCUDACluster

        options = [worker["options"] for worker in workers.values()]
        return OwnCUDACluster(cards.of_rank, options, scheduler["options"], asynchronous)
    for rank, worker in enumerate(workers.values() if cards else ()):
        worker["options"] = _joined(worker["options"], cards.options_of(rank))
    return OwnCluster(
        workers=workers,
        scheduler=scheduler,
        asynchronous=asynchronous,
        silence_logs=logging.WARNING,
    )


def _checked_shapes(instances: Mapping[Role, Instances]) -> list[tuple[Role, Parallelism]]:
    shapes = [(role, shape) for role in Role for shape in _shapes(instances.get(role, 0))]
    roles = {role for role, _ in shapes}
    if not roles or (Role.PREFILL in roles) != (Role.DECODE in roles):
        counts = {role: len(_shapes(instances.get(role, 0))) for role in Role}
        raise ConfigError(
            "an own cluster needs prefill and decode instances, or colocated ones; asked for "
            + ", ".join(f"{role.value.lower()}={count}" for role, count in counts.items())
        )
    return shapes


def instance_workers(
    name: str,
    role: Role,
    shape: Parallelism,
    config: EngineConfig,
    settings: ServiceSettings,
    cores: Sequence[Sequence[int] | None],
    is_flippable: bool,
) -> dict[str, Any]:
    """The workers of one instance, a process per rank, by their names.

    Parameters
    ----------
    name
        Of the instance, and of the worker of its head.
    cores
        Of each rank.
    is_flippable
        It can take the other one of the roles PREFILL and DECODE.
    """
    return {
        f"{name}.{rank}" if rank else name: _worker(
            role, config, settings, own, _place(name, shape, rank), is_flippable
        )
        for rank, own in enumerate(cores)
    }


def own_cluster_config(dashboard_address: str | None) -> dict[str, Any]:
    """Dask settings for a scheduler that serves nobody but us."""
    origins = [dashboard_address] if dashboard_address else []
    return {
        # Copies of prefill results must stay where the KV is; nothing else lives here.
        "distributed.scheduler.active-memory-manager.start": False,
        "distributed.scheduler.work-stealing": False,
        "distributed.scheduler.worker-ttl": WORKER_TTL,
        # Dask keeps its last 1000 messages per connection, and ours hold whole prompts.
        "distributed.admin.low-level-log-length": 0,
        # Every look that Dask takes at itself preempts the engine of the same core.
        "distributed.worker.profile.enabled": False,
        "distributed.admin.tick.interval": "500ms",
        "distributed.worker.memory.monitor-interval": "500ms",
        "distributed.scheduler.dashboard.bokeh-application.allow_websocket_origin": origins,
    }


def _scheduler(protocol: str, dashboard_address: str | None) -> dict[str, Any]:
    return {
        "cls": Scheduler,
        "options": {
            "host": HOST,
            "port": 0,
            "protocol": protocol,
            "dashboard": dashboard_address is not None,
            "dashboard_address": dashboard_address or f"{HOST}:0",
        },
    }


def num_slots(role: Role, config: EngineConfig, settings: ServiceSettings) -> int:
    """Tasks that an instance runs at once: its queue and its batch."""
    if role is Role.PREFILL:
        return settings.prefill_slots
    if role is Role.DECODE:
        return config.max_batch_size
    return config.max_batch_size + settings.prefill_slots


def shapes_of(instances: Mapping[Role, Instances]) -> list[Parallelism]:
    """The shape of every instance, in the order in which their ranks are started."""
    return [shape for role in Role for shape in _shapes(instances.get(role, 0))]


def _shapes(instances: Instances) -> Sequence[Parallelism]:
    return (Parallelism(),) * instances if isinstance(instances, int) else instances


def _place(instance: str, shape: Parallelism, rank: int) -> dict[str, Any]:
    """Of the section ``daskserve.rank`` of a worker's configuration."""
    return {
        "instance": instance,
        "number": rank,
        "tensor-parallel": shape.tp,
        "pipeline-parallel": shape.pp,
    }


def _worker(
    role: Role,
    config: EngineConfig,
    settings: ServiceSettings,
    cores: Sequence[int] | None,
    place: dict[str, Any],
    is_flippable: bool,
) -> dict[str, Any]:
    roles = [role] if place["number"] == 0 else []
    if roles and is_flippable and role is not Role.COLOCATED:
        roles.append(Role.DECODE if role is Role.PREFILL else Role.PREFILL)
    slots = {each.value: num_slots(each, config, settings) for each in roles}
    num_threads = config.num_threads or (len(cores) if cores else os.cpu_count() or 1)
    return {
        "cls": Nanny,
        "options": {
            "host": HOST,
            "protocol": settings.protocol,
            "nthreads": max(slots.values(), default=1),
            "resources": slots,
            "config": {f"daskserve.rank.{key}": value for key, value in place.items()},
            "memory_limit": 0,  # the KV pool is ours to watch, Dask would take it for a leak
            "dashboard": False,
            "dashboard_address": f"{HOST}:0",
            "env": dict.fromkeys(_THREAD_VARIABLES, str(num_threads)) | _QUIET,
            "plugins": (CoreAffinity(cores),) if cores else (),
            # Failed requests raise where they are awaited; what workers log of them, and of the
            # moment the cluster stops, is noise.
            "silence_logs": logging.CRITICAL,
        },
    }


def _check_protocol(protocol: str) -> None:
    try:
        get_backend(protocol)
    except ValueError as error:
        hint = "; pip install distributed-ucxx-cu12" if protocol.startswith("ucx") else ""
        raise ConfigError(f"protocol={protocol}: {error}{hint}") from None


def _joined(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Options of a worker; environments and settings of both hold."""
    both = {name: first[name] | value for name, value in second.items() if name in _MAPPINGS}
    return first | second | both


def _share(cores: Cores, count: int) -> list[Sequence[int] | None]:
    if cores is None:
        return [None] * count
    if cores == "auto":
        return _auto_share(count)
    if isinstance(cores, str) or len(cores) != count:
        raise ConfigError(f"cores={cores!r} must be 'auto', None or {count} lists of core numbers")
    allowed = _allowed_cores()
    for own in cores:
        if not own or not set(own) <= set(allowed):
            raise ConfigError(f"cores={list(own)!r} must be some of {allowed}")
    return [tuple(own) for own in cores]


def _auto_share(count: int) -> list[Sequence[int] | None]:
    if not hasattr(os, "sched_getaffinity"):
        return [None] * count
    allowed = _allowed_cores()
    if len(allowed) < count:
        return [(allowed[index % len(allowed)],) for index in range(count)]
    bounds = [len(allowed) * index // count for index in range(count + 1)]
    return [tuple(allowed[bounds[i] : bounds[i + 1]]) for i in range(count)]


def _allowed_cores() -> list[int]:
    if not hasattr(os, "sched_getaffinity"):
        raise ConfigError("cores= needs Linux; use cores=None here")
    return sorted(os.sched_getaffinity(0))

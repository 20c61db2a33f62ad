"""Brings up one rank of an instance: its connections and its part of the weights."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist

from daskserve.core.instance import EngineConfig, Role
from daskserve.core.placement import Parallelism
from daskserve.errors import ConfigError, InstanceLost, ModelError
from daskserve.models.catalog import resolve
from daskserve.workers.cuda.device import resolve_device
from daskserve.workers.parallel.balance import stage_layers
from daskserve.workers.parallel.computing import Computing, DeviceComputing, HostComputing
from daskserve.workers.parallel.group import HEAD, RankGroup, call_off
from daskserve.workers.parallel.links import Transport, nccl
from daskserve.workers.parallel.loader import ShardedModel, load_stage, read_model
from daskserve.workers.parallel.stage import ROOM, Stage

ADDRESS = "address"
_STAGES = "stage layers"


@dataclass(frozen=True, slots=True)
class RankDevice:
    """Where a rank computes.

    Parameters
    ----------
    computing
        With what.
    transport
        What moves hidden states and sums; None: what moves orders and answers.
    """

    computing: Computing
    transport: Transport | None = None


def start_rank(
    config: EngineConfig,
    parallelism: Parallelism,
    rank: int,
    store: dist.Store,
    *,
    host: str,
    address: str,
    load_timeout_s: float,
    role: Role = Role.COLOCATED,
    device: RankDevice | None = None,
) -> Stage:
    """Join the group, load this rank's weights and wait until all ranks have done so.

    Parameters
    ----------
    config
        ``model``, ``dtype``, ``device``, ``num_threads``, ``gpu_memory_fraction`` and
        ``rank_timeout_s`` are used; the same on all ranks.
    parallelism, rank
        Shape of the instance, and which rank to be.
    store
        Of `open_group` or `join_group`.
    host
        Address of this host that the other ranks reach.
    address
        Where the KV of this rank can be pulled from; see `RankGroup.shared`.
    load_timeout_s
        Most seconds until all ranks are there, and again until all have their weights.
    role
        What the instance does; the head says it, and with that how the layers are shared out.
    device
        What to compute with and what to move it over; None: as ``config.device`` says.

    Raises
    ------
    ModelError, InvalidParameter
        The model does not run in this shape, or its files do not fit, here or on another rank.
    InstanceLost
        Another rank is gone or never came; the error names it.
    ConfigError
        There is no such device.
    """
    device = device or _device_of(config, rank, store)
    model = read_model(resolve(config.model), parallelism)
    if rank == HEAD:
        _tell_stages(store, stage_layers(model.config, parallelism.pp, role))
    group = RankGroup(
        store,
        parallelism,
        rank,
        host=host,
        timeout_s=config.rank_timeout_s,
        assembly_s=load_timeout_s,
        transport=device.transport,
    )
    stage = _load(model, group, device.computing, config.gpu_memory_fraction)
    _wait_for_all(stage, address, load_timeout_s)
    return stage


def _wait_for_all(stage: Stage, address: str, timeout_s: float) -> None:
    """Until every rank has its weights; then they run their layers together for the first time."""
    group = stage.group
    try:
        group.share(ADDRESS, address)
        group.meet("loaded", timeout_s)
        stage.learn()
        group.meet("ready", timeout_s)  # some compile kernels for longer than others
    except InstanceLost as error:
        if group.has_failed_rank:
            raise ModelError(str(error)) from error
        raise
    except Exception as error:
        group.fail(error)
        raise


def _device_of(config: EngineConfig, rank: int, store: dist.Store) -> RankDevice:
    """Where this rank computes; if it cannot, the others do not wait for it (ConfigError)."""
    try:
        device = resolve_device(config.device)
        dtype = getattr(torch, config.dtype)
        if device.type == "cuda":
            return RankDevice(DeviceComputing(device, dtype), nccl(device, config.rank_timeout_s))
    except ConfigError as error:
        call_off(store, rank, str(error))
        raise
    num_threads = config.num_threads or len(os.sched_getaffinity(0))
    return RankDevice(HostComputing(dtype, num_threads))


def _tell_stages(store: dist.Store, layers: tuple[int, ...]) -> None:
    store.set(_STAGES, " ".join(map(str, layers)))


def _load(
    model: ShardedModel, group: RankGroup, computing: Computing, memory_fraction: float
) -> Stage:
    """This rank's share, as the head shares the layers out; says what room is left for KV."""
    with group.watched():
        told = group.store.get(_STAGES).decode()
    try:
        model = model.shared_out(tuple(map(int, told.split())))
        stage = load_stage(model, group, computing)
        group.share(ROOM, str(stage.room_tokens(memory_fraction)))
        return stage
    except Exception as error:
        group.fail(error)
        raise

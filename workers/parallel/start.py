"""Brings up one rank of an instance: its connections and its part of the weights."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from daskserve.core.instance import EngineConfig, Role
from daskserve.core.placement import Parallelism
from daskserve.errors import InstanceLost, ModelError
from daskserve.models.catalog import resolve
from daskserve.workers.parallel.balance import stage_layers
from daskserve.workers.parallel.group import HEAD, RankGroup
from daskserve.workers.parallel.loader import ShardedModel, load_stage, read_model
from daskserve.workers.parallel.stage import Stage

ADDRESS = "address"
_STAGES = "stage layers"


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
) -> Stage:
    """Join the group, load this rank's weights and wait until all ranks have done so.

    Parameters
    ----------
    config
        ``model``, ``dtype``, ``num_threads`` and ``rank_timeout_s`` are used; the
        same on all ranks.
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

    Raises
    ------
    ModelError, InvalidParameter
        The model does not run in this shape, or its files do not fit, here or on another rank.
    InstanceLost
        Another rank is gone or never came; the error names it.
    """
    if config.device == "cuda":
        raise ModelError("device=cuda: instances of several ranks compute on CPUs only")
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
    )
    stage = _load(model, group, config)
    try:
        group.share(ADDRESS, address)
        group.meet("loaded", load_timeout_s)
    except InstanceLost as error:
        if group.has_failed_rank:
            raise ModelError(str(error)) from error
        raise
    return stage


def _tell_stages(store: dist.Store, layers: tuple[int, ...]) -> None:
    store.set(_STAGES, " ".join(map(str, layers)))


def _load(model: ShardedModel, group: RankGroup, config: EngineConfig) -> Stage:
    """This rank's share, as the head shares the layers out."""
    with group.watched():
        told = group.store.get(_STAGES).decode()
    num_threads = config.num_threads or len(os.sched_getaffinity(0))
    try:
        model = model.shared_out(tuple(map(int, told.split())))
        return load_stage(model, group, getattr(torch, config.dtype), num_threads)
    except Exception as error:
        group.fail(error)
        raise

"""A placement file as instances of a service: roles, shapes, names, and the engine of each."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from daskserve.core.instance import DEFAULT_BLOCK_SIZE, EngineConfig, Role
from daskserve.core.placement import InstancePlacement, Parallelism, Placement
from daskserve.errors import ConfigError


def shapes_of(placement: Placement) -> dict[str, list[Parallelism]]:
    """The shapes of the instances of each role, as `Service.local` takes them.

    Raises
    ------
    ConfigError
        The placement needs more than one machine, or mixes colocated with other instances.
    """
    if placement.num_nodes > 1:
        raise ConfigError(
            f"the placement spans {placement.num_nodes} nodes, this command starts instances on "
            "one: start the workers there with what daskserve deploy writes, and give --scheduler"
        )
    check_roles(placement)
    return {role.value.lower(): [i.parallelism for i in placement.of_role(role)] for role in Role}


def check_roles(placement: Placement) -> None:
    """A service works with colocated instances or with the others, not with both (ConfigError)."""
    if placement.num_instances(Role.COLOCATED) and placement.num_instances(Role.PREFILL):
        raise ConfigError("the placement mixes COLOCATED with PREFILL and DECODE instances")


def engines_of(placement: Placement, config: EngineConfig) -> dict[str, EngineConfig]:
    """By name the engine of every instance, with the limits that it was planned with."""
    return {
        name: _engine_of(instance, config)
        for name, instance in zip(placement.names, placement.instances, strict=True)
    }


def _engine_of(instance: InstancePlacement, config: EngineConfig) -> EngineConfig:
    """A batch is as many micro-batches, whose size is planned, as there are stages."""
    capacity, batch = instance.kv_capacity_tokens, instance.max_batch_size
    block_size = config.block_size or DEFAULT_BLOCK_SIZE
    planned: dict[str, Any] = {
        "prefill_budget_tokens": instance.prefill_budget_tokens,
        "chunk_tokens": instance.chunk_tokens,
        "num_kv_blocks": max(1, capacity // block_size) if capacity else None,
        "block_size": block_size,
    }
    if instance.role is not Role.PREFILL:
        planned["max_batch_size"] = batch * instance.parallelism.pp if batch else None
    return replace(config, **{name: value for name, value in planned.items() if value})

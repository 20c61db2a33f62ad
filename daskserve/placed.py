"""A placement file as instances on this machine: their roles and shapes, and their engine."""

from __future__ import annotations

from dataclasses import replace

from daskserve.core.instance import EngineConfig, Role
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
            "one: start the workers there and give --scheduler"
        )
    shapes = {role.value.lower(): [i.parallelism for i in placement.of_role(role)] for role in Role}
    if shapes["colocated"] and shapes["prefill"]:
        raise ConfigError("the placement mixes COLOCATED with PREFILL and DECODE instances")
    return shapes


def engine_of(placement: Placement, config: EngineConfig) -> EngineConfig:
    """The engine with the limits that the placement was planned with (ConfigError).

    All instances share one configuration here, so those of one role must not differ; of the KV
    capacities the smallest counts. A batch is as many micro-batches as there are stages.
    """
    has_colocated = placement.num_instances(Role.COLOCATED) > 0
    first = placement.of_role(Role.COLOCATED if has_colocated else Role.PREFILL)
    last = placement.of_role(Role.COLOCATED if has_colocated else Role.DECODE)
    capacities = [i.kv_capacity_tokens for i in placement.instances if i.kv_capacity_tokens]
    planned = {
        "prefill_budget_tokens": _same("prefill_budget_tokens", first),
        "max_batch_size": _batch_size(last),
        "chunk_tokens": _same("chunk_tokens", first),
        "num_kv_blocks": max(1, min(capacities) // config.block_size) if capacities else None,
    }
    return replace(config, **{name: value for name, value in planned.items() if value})


def _same(name: str, instances: tuple[InstancePlacement, ...]) -> int | None:
    return _one(name, instances, {getattr(instance, name) for instance in instances})


def _batch_size(instances: tuple[InstancePlacement, ...]) -> int | None:
    """Planned is the size of a micro-batch, of which a step has one per stage."""
    sizes = ((i.max_batch_size, i.parallelism.pp) for i in instances)
    return _one("max_batch_size", instances, {size and size * pp for size, pp in sizes})


def _one(
    name: str, instances: tuple[InstancePlacement, ...], values: set[int | None]
) -> int | None:
    if len(values) > 1:
        role = instances[0].role.value
        shown = ", ".join(str(value) for value in sorted(values, key=str))
        raise ConfigError(f"{name} differs between {role} instances ({shown}); make it one value")
    return next(iter(values), None)

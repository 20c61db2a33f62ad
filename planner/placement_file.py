"""Placements as YAML: what ``daskserve plan`` writes and ``daskserve simulate`` reads."""

from __future__ import annotations

import difflib
from pathlib import Path

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from daskserve.core.instance import Role
from daskserve.core.placement import GPULocation, InstancePlacement, Parallelism, Placement
from daskserve.errors import ConfigError, InvalidParameter
from daskserve.planner.hardware import GBPS

VERSION = 1
LIMITS = ("kv_capacity_tokens", "prefill_budget_tokens", "max_batch_size", "chunk_tokens")


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class _Instance(_Strict):
    role: str
    tp: int
    pp: int
    gpus: list[list[int]]
    gpu_type: str = ""
    kv_capacity_tokens: int | None = None
    prefill_budget_tokens: int | None = None
    max_batch_size: int | None = None
    chunk_tokens: int | None = None


class _File(_Strict):
    version: int
    model: str = ""
    gpus_per_node: int
    network_gbps: float | None = None
    instances: list[_Instance]


def placement_to_yaml(placement: Placement, comment: str = "") -> str:
    """The placement as text; ``comment`` lines go to its head."""
    rows = []
    for instance in placement.instances:
        row = {
            "role": str(instance.role),
            "tp": instance.parallelism.tp,
            "pp": instance.parallelism.pp,
            "gpu_type": instance.gpu_type,
            "gpus": [[gpu.node, gpu.gpu] for gpu in instance.gpus],
        }
        limits = {name: getattr(instance, name) for name in LIMITS}
        rows.append(row | {name: value for name, value in limits.items() if value is not None})
    document = {
        "version": VERSION,
        "model": placement.model,
        "gpus_per_node": placement.gpus_per_node,
    }
    if placement.network_bandwidth is not None:
        document["network_gbps"] = placement.network_bandwidth / GBPS
    document["instances"] = rows
    head = "".join(f"# {line}\n" for line in comment.splitlines())
    return head + yaml.safe_dump(document, sort_keys=False, default_flow_style=None, width=100)


def placement_from_yaml(text: str, source: str = "placement") -> Placement:
    """Read a placement back.

    Raises
    ------
    ConfigError
        Not YAML, unknown or missing keys (the nearest valid one is named), values of the wrong
        kind, or instances that no cluster can hold.
    """
    try:
        document = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{source} is not YAML: {error}") from error
    if not isinstance(document, dict):
        raise ConfigError(f"{source} must be a mapping with version, gpus_per_node and instances")
    try:
        file = _File.model_validate(document)
    except ValidationError as error:
        raise ConfigError(f"{source}: {_first_problem(error)}") from error
    if file.version != VERSION:
        raise ConfigError(f"{source} has version {file.version}; this reads version {VERSION}")
    try:
        instances = tuple(_instance(row) for row in file.instances)
        network = None if file.network_gbps is None else file.network_gbps * GBPS
        return Placement(instances, file.gpus_per_node, file.model, network)
    except (InvalidParameter, ValueError) as error:
        raise ConfigError(f"{source}: {error}") from error


def read_placement(path: str | Path) -> Placement:
    """Read a placement file. Raises ConfigError."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    return placement_from_yaml(text, str(path))


def _instance(row: _Instance) -> InstancePlacement:
    gpus = []
    for pair in row.gpus:
        if len(pair) != 2:
            raise ValueError(f"gpus must be pairs of node and GPU, not {pair}")
        gpus.append(GPULocation(*pair))
    limits = {name: getattr(row, name) for name in LIMITS}
    return InstancePlacement(
        Role(row.role), Parallelism(row.tp, row.pp), tuple(gpus), row.gpu_type, **limits
    )


def _first_problem(error: ValidationError) -> str:
    # An unknown key explains a missing one, so it comes first.
    problem = min(error.errors(), key=lambda one: one["type"] != "extra_forbidden")
    where = ".".join(str(part) for part in problem["loc"])
    if problem["type"] != "extra_forbidden":
        return f"{where}: {problem['msg']}"
    model = _Instance if len(problem["loc"]) > 1 else _File
    near = difflib.get_close_matches(str(problem["loc"][-1]), model.model_fields, n=1)
    return f"{where} is not a key" + (f"; did you mean {near[0]}?" if near else "")

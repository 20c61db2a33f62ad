"""Which instance runs on which GPUs: what the planner decides and the cluster carries out."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from daskserve.core.instance import Role
from daskserve.errors import InvalidParameter


@dataclass(frozen=True, slots=True, order=True)
class Parallelism:
    """Tensor-parallel degree within a stage and number of pipeline stages."""

    tp: int = 1
    pp: int = 1

    def __post_init__(self) -> None:
        for name in ("tp", "pp"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InvalidParameter(name, value, "must be a whole number of at least 1")

    @property
    def num_gpus(self) -> int:
        return self.tp * self.pp

    def __str__(self) -> str:
        return f"TP{self.tp}xPP{self.pp}"


@dataclass(frozen=True, slots=True, order=True)
class GPULocation:
    """Node and GPU within the node, both counted from 0."""

    node: int
    gpu: int


@dataclass(frozen=True, slots=True)
class InstancePlacement:
    """One instance, its GPUs and the limits it was planned with.

    Parameters
    ----------
    gpus
        One per rank, stage after stage: stage s owns ``gpus[s * tp : (s + 1) * tp]``.
    gpu_type
        Name of the GPU, as in ``daskserve plan --gpus``.
    kv_capacity_tokens, prefill_budget_tokens, max_batch_size
        The engine's limits; an instance that starts with these has the memory it was planned
        with. ``max_batch_size`` counts the requests of one micro-batch. None: not planned.
    chunk_tokens
        COLOCATED only: tokens per mixed step of chunked prefill; None runs whole prompts first.
    """

    role: Role
    parallelism: Parallelism
    gpus: tuple[GPULocation, ...]
    gpu_type: str = ""
    kv_capacity_tokens: int | None = None
    prefill_budget_tokens: int | None = None
    max_batch_size: int | None = None
    chunk_tokens: int | None = None

    def __post_init__(self) -> None:
        if len(self.gpus) != self.parallelism.num_gpus:
            limit = f"must name {self.parallelism.num_gpus} GPUs, one per rank"
            raise InvalidParameter("gpus", len(self.gpus), limit)
        if self.chunk_tokens is not None and self.role is not Role.COLOCATED:
            raise InvalidParameter("chunk_tokens", self.chunk_tokens, "is for COLOCATED instances")

    def stage_gpus(self, stage: int) -> tuple[GPULocation, ...]:
        """The GPUs of one pipeline stage."""
        tp = self.parallelism.tp
        return self.gpus[stage * tp : (stage + 1) * tp]

    @property
    def nodes(self) -> tuple[int, ...]:
        return tuple(sorted({location.node for location in self.gpus}))


@dataclass(frozen=True, slots=True)
class Placement:
    """All instances of a deployment. GPUs used and GPUs occupied differ when nodes are not full.

    Parameters
    ----------
    model
        Name of the model that every instance runs.
    gpus_per_node
        GPUs in a node: an occupied node counts whole.
    network_bandwidth
        Bytes/s between nodes that the KV transfers were planned with; None: not planned.
    """

    instances: tuple[InstancePlacement, ...]
    gpus_per_node: int
    model: str = ""
    network_bandwidth: float | None = None

    def __post_init__(self) -> None:
        if not self.instances:
            raise InvalidParameter("instances", 0, "must name at least one instance")
        owners = Counter(gpu for instance in self.instances for gpu in instance.gpus)
        for location, num_owners in owners.items():
            if num_owners > 1:
                where = f"node {location.node}, GPU {location.gpu}"
                raise InvalidParameter(
                    "gpus", where, f"belongs to {num_owners} ranks; only one may"
                )
            if location.node < 0 or not 0 <= location.gpu < self.gpus_per_node:
                where = f"node {location.node}, GPU {location.gpu}"
                limit = f"does not exist: nodes have {self.gpus_per_node} GPUs"
                raise InvalidParameter("gpus", where, limit)
        has = {role: self.num_instances(role) > 0 for role in Role}
        if has[Role.PREFILL] != has[Role.DECODE]:
            roles = ", ".join(role for role in Role if has[role])
            raise InvalidParameter(
                "instances", roles, "must hold both or neither of PREFILL, DECODE"
            )

    @property
    def names(self) -> tuple[str, ...]:
        """Of each instance; its ranks find each other by it.

        Numbered through, prefill instances first: ``prefill-0``, ``prefill-1``, ``decode-2``.
        """
        order = sorted(self.instances, key=lambda instance: list(Role).index(instance.role))
        names = {id(one): f"{one.role.value.lower()}-{i}" for i, one in enumerate(order)}
        return tuple(names[id(instance)] for instance in self.instances)

    def num_instances(self, role: Role) -> int:
        return sum(instance.role is role for instance in self.instances)

    def of_role(self, role: Role) -> tuple[InstancePlacement, ...]:
        return tuple(instance for instance in self.instances if instance.role is role)

    @property
    def num_gpus_used(self) -> int:
        return sum(instance.parallelism.num_gpus for instance in self.instances)

    @property
    def num_nodes(self) -> int:
        return len({location.node for i in self.instances for location in i.gpus})

    @property
    def num_gpus_occupied(self) -> int:
        """GPUs of every node that holds at least one rank."""
        return self.num_nodes * self.gpus_per_node

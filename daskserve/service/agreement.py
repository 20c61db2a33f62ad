"""Whether the processes of a cluster can work together: pure judgements on their `Presence`.

Some differences break things at once or, worse, later: they are refused. Others only make results
differ in the last bits, or nothing at all: they are worth a warning.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from daskserve.core.placement import InstancePlacement, Placement
from daskserve.service.presence import Presence

_SHARED = ("dtype", "block_size", "model_digest")
_WARNED = ("dask", "torch", "transformers", "tokenizers", "numpy")


def refused_versions(processes: Sequence[Presence]) -> list[str]:
    """What keeps the processes from working together; each line has every value and address."""
    reasons = [f"{p.who}: {p.error}" for p in processes if p.error]
    known = [p for p in processes if not p.error]
    reasons += _differences("daskserve", known, _daskserve)
    reasons += _differences("distributed", known, lambda p: p.versions.get("distributed", ""))
    reasons += _differences("python", known, _python_minor)
    by_instance: dict[str, list[Presence]] = defaultdict(list)
    for process in known:
        if process.instance:
            by_instance[process.instance].append(process)
    for name, ranks in by_instance.items():
        # The ranks of an instance talk through torch itself.
        what = f"torch among the ranks of {name}"
        reasons += _differences(what, ranks, lambda p: p.versions.get("torch", ""))
    return reasons


def doubtful_versions(processes: Sequence[Presence]) -> list[str]:
    """What differs and may be as it is: answers may differ between instances in the last bits."""
    known = [p for p in processes if not p.error]
    lines: list[str] = []
    for name in _WARNED:
        having = [p for p in known if name in p.versions]  # a client needs no torch
        lines += _differences(name, having, lambda p, name=name: p.versions[name])
    return lines


def unlike(info: Mapping[str, Any], others: Mapping[str, Mapping[str, Any]]) -> str:
    """In what an instance differs from those that work already, so that it may not join them.

    Parameters
    ----------
    info
        Fields of its `InstanceInfo`.
    others
        The same of the others, by address.

    Returns
    -------
    str
        Both values and whose the other one is; empty if it may join.
    """
    for name in _SHARED:
        for address, other in others.items():
            if info.get(name) != other.get(name):
                return f"{name}={info.get(name)} here, {other.get(name)} on {address}"
    return ""


def _differences(
    what: str, processes: Sequence[Presence], value_of: Callable[[Presence], str]
) -> list[str]:
    by_value: dict[str, list[str]] = defaultdict(list)
    for process in processes:
        by_value[value_of(process)].append(process.who)
    if len(by_value) < 2:
        return []
    parts = (f"{value or 'none'} on {', '.join(who)}" for value, who in by_value.items())
    return [f"{what} differs: {'; '.join(parts)}"]


def _daskserve(process: Presence) -> str:
    return f"{process.versions.get('daskserve', '?')} (code {process.wire})"


def _python_minor(process: Presence) -> str:
    return ".".join(process.versions.get("python", "").split(".")[:2])


def missing_ranks(placement: Placement, workers: Sequence[Presence]) -> list[str]:
    """Ranks of the placement that no worker is: they may yet come."""
    here = {(worker.instance, worker.number) for worker in workers}
    return [
        f"rank {number} of {name} (node {gpu.node}, GPU {gpu.gpu})"
        for name, instance in zip(placement.names, placement.instances, strict=True)
        for number, gpu in enumerate(instance.gpus)
        if (name, number) not in here
    ]


def misplaced_ranks(placement: Placement, workers: Sequence[Presence]) -> list[str]:
    """Where what runs is not what was placed; no waiting helps."""
    planned = dict(zip(placement.names, placement.instances, strict=True))
    problems = []
    for worker in workers:
        if worker.error:
            problems.append(f"{worker.who}: {worker.error}")
        elif worker.instance in planned:
            problems += _misplaced(worker, planned[worker.instance])
        elif worker.role is not None:
            name = worker.instance or "an instance without a name"
            problems.append(
                f"{worker.who} has the role {worker.role.value} as {name}, which the placement"
                " does not have"
            )
    return problems + _doubled(workers) + _scattered(workers)


def _misplaced(worker: Presence, planned: InstancePlacement) -> list[str]:
    shape = planned.parallelism
    if (worker.tp, worker.pp) != (shape.tp, shape.pp):
        return [f"{worker.rank} was started as TP{worker.tp}xPP{worker.pp}, placed as {shape}"]
    role = planned.role if worker.number == 0 else None
    problems = []
    if worker.role is not role:
        has, needs = (r.value if r else "none" for r in (worker.role, role))
        problems.append(f"{worker.rank} carries the role {has}, placed as {needs}")
    place = planned.gpus[worker.number]
    is_elsewhere = worker.node is not None and worker.node != place.node
    if is_elsewhere or (worker.gpu is not None and worker.gpu != place.gpu):
        problems.append(
            f"{worker.rank} was started for node {worker.node}, GPU {worker.gpu}; placed on node"
            f" {place.node}, GPU {place.gpu}"
        )
    if not is_of_type(worker.gpu_name, planned.gpu_type):
        problems.append(f"{worker.rank} has a {worker.gpu_name}, placed on {planned.gpu_type}")
    return problems


def is_of_type(gpu_name: str, planned: str) -> bool:
    """Whether a GPU may be of the planned type, so far as their names tell."""
    family = planned.split("-")[0].replace(" ", "").lower()
    return not gpu_name or not family or family in gpu_name.replace(" ", "").lower()


def _doubled(workers: Sequence[Presence]) -> list[str]:
    by_rank: dict[tuple[str, int], list[str]] = defaultdict(list)
    by_gpu: dict[tuple[str, str], list[str]] = defaultdict(list)
    for worker in workers:
        if worker.instance:
            by_rank[worker.instance, worker.number].append(worker.who)
        if worker.gpu_uuid:
            by_gpu[worker.host, worker.gpu_uuid].append(worker.rank)
    problems = [
        f"several workers are rank {number} of {name}: {', '.join(who)}"
        for (name, number), who in by_rank.items()
        if len(who) > 1
    ]
    return problems + [
        f"one GPU of {host} is used by {', '.join(ranks)}"
        for (host, _), ranks in by_gpu.items()
        if len(ranks) > 1
    ]


def _scattered(workers: Sequence[Presence]) -> list[str]:
    """What was placed on one node shares its links: it must be one host."""
    hosts: dict[int, set[str]] = defaultdict(set)
    for worker in workers:
        if worker.node is not None and worker.instance:
            hosts[worker.node].add(worker.host)
    return [
        f"node {node} of the placement is spread over the hosts {', '.join(sorted(names))}"
        for node, names in sorted(hosts.items())
        if len(names) > 1
    ]

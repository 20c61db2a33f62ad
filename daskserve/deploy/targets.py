"""The targets by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from daskserve.config import settings
from daskserve.core.placement import Placement
from daskserve.deploy import commands, jobqueue, kubernetes, slurm
from daskserve.deploy.ranks import Rank, ranks_by_node
from daskserve.deploy.site import Site

Nodes = dict[int, list[Rank]]


@dataclass(frozen=True, slots=True)
class _Target:
    render: Callable[[Nodes, Site, str], dict[str, str]]
    steps: Callable[[Nodes, Site, str], list[str]]


TARGETS = {
    "commands": _Target(commands.render, commands.steps),
    "slurm": _Target(slurm.render, slurm.steps),
    "jobqueue": _Target(jobqueue.render, jobqueue.steps),
    "kubernetes": _Target(kubernetes.render, kubernetes.steps),
}


@dataclass(frozen=True, slots=True)
class Deployment:
    """What `deploy` gives: texts by file name, and what to do with them."""

    files: dict[str, str]
    steps: tuple[str, ...]


def deploy(placement: Placement, site: Site, target: str, folder: str) -> Deployment:
    """A placement as what starts it.

    Parameters
    ----------
    target
        A key of `TARGETS`.
    folder
        Where the files will be, on the hosts too: an absolute path.

    Raises
    ------
    ConfigError
        The site lacks something that the target needs, or no service could use the placement.
    """
    nodes = ranks_by_node(placement, site, settings().service)
    chosen = TARGETS[target]
    return Deployment(chosen.render(nodes, site, folder), tuple(chosen.steps(nodes, site, folder)))

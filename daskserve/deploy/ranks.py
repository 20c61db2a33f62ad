"""What every rank of a placement is started with, whatever starts it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from daskserve.config import ServiceSettings
from daskserve.core.instance import EngineConfig, Role
from daskserve.core.placement import InstancePlacement, Placement
from daskserve.deploy.site import Site
from daskserve.errors import ConfigError
from daskserve.placed import check_roles, engines_of
from daskserve.service.local import num_slots, own_cluster_config

PRELOAD = "daskserve.service.nanny_preload"
"""Has workers drain before their nanny ends them."""

NO_DASHBOARD = ("--no-dashboard", "--dashboard-address", "127.0.0.1:0")
"""Without one, Dask still serves metrics over HTTP: on loopback then."""

DEATH_TIMEOUT_S = 300
"""A worker that finds no scheduler for so long gives up."""


@dataclass(frozen=True, slots=True)
class Rank:
    """One worker.

    Parameters
    ----------
    instance, number
        Which rank of which instance.
    node, gpu
        Where the placement has it.
    role
        Of the instance; only the head, number 0, carries it as a resource.
    slots
        Requests that the instance works on at once.
    variables
        Its own part of the environment.
    """

    instance: str
    number: int
    node: int
    gpu: int
    role: Role
    slots: int
    variables: Mapping[str, str]

    @property
    def is_head(self) -> bool:
        return self.number == 0

    @property
    def name(self) -> str:
        """Of the worker in Dask."""
        return self.instance if self.is_head else f"{self.instance}.{self.number}"

    @property
    def num_threads(self) -> int:
        """Of Dask: it runs as many tasks at once on the head, none on the others."""
        return self.slots if self.is_head else 1

    @property
    def resources(self) -> str:
        return f"{self.role.value}={self.slots}" if self.is_head else ""


def ranks_by_node(
    placement: Placement, site: Site, settings: ServiceSettings
) -> dict[int, list[Rank]]:
    """Every rank of the placement, by number of its node.

    Raises
    ------
    ConfigError
        No service could work with the placement.
    """
    check_roles(placement)
    engines = engines_of(placement, EngineConfig())
    nodes: dict[int, list[Rank]] = {node: [] for node in _nodes(placement)}
    for name, instance in zip(placement.names, placement.instances, strict=True):
        slots = num_slots(instance.role, engines[name], settings)
        for rank in _ranks(name, instance, slots, site):
            nodes[rank.node].append(rank)
    for ranks in nodes.values():
        ranks.sort(key=lambda rank: rank.gpu)
    return nodes


def _nodes(placement: Placement) -> list[int]:
    return sorted({gpu.node for instance in placement.instances for gpu in instance.gpus})


def _ranks(name: str, instance: InstancePlacement, slots: int, site: Site) -> list[Rank]:
    shape = instance.parallelism
    ranks = []
    for number, place in enumerate(instance.gpus):
        section = {
            "rank.instance": name,
            "rank.number": number,
            "rank.tensor-parallel": shape.tp,
            "rank.pipeline-parallel": shape.pp,
            "rank.node": place.node,
            "rank.gpu": place.gpu,
        }
        variables = {variable_of(f"daskserve.{key}"): str(value) for key, value in section.items()}
        if site.device == "cuda":
            variables = {"CUDA_VISIBLE_DEVICES": str(place.gpu), **variables}
        ranks.append(Rank(name, number, place.node, place.gpu, instance.role, slots, variables))
    return ranks


def worker_command(rank: Rank, site: Site, where: list[str], cores: range | None) -> list[str]:
    """The words that start the worker of a rank.

    ``dask cuda worker`` starts a worker for each GPU that it sees, all alike: so there is one
    command per rank, which sees one GPU.

    Parameters
    ----------
    where
        Words that say where the scheduler is and what to listen on.
    cores
        CPUs only: the cores to run on.
    """
    words = [*(["taskset", "-c", f"{cores[0]}-{cores[-1]}"] if cores else []), "dask"]
    words += ["cuda", "worker"] if site.device == "cuda" else ["worker"]
    words += [*where, "--name", rank.name, "--nthreads", str(rank.num_threads)]
    if rank.resources:
        words += ["--resources", rank.resources]
    # The KV pool is the engine's to watch; Dask would take it for a leak, and spill.
    words += ["--memory-limit", "0", *NO_DASHBOARD, "--death-timeout", str(DEATH_TIMEOUT_S)]
    if site.device == "cuda":
        return words + ["--device-memory-limit", "auto", *_ucx_options(site)]
    return words + ["--nworkers", "1", "--preload-nanny", PRELOAD]


def _ucx_options(site: Site) -> list[str]:
    if site.protocol != "ucx":
        return []
    words = ["--protocol", "ucx"]
    for name, is_wanted in (("infiniband", site.infiniband), ("nvlink", site.nvlink)):
        if is_wanted is not None:
            words.append(f"--{'enable' if is_wanted else 'disable'}-{name}")
    return words + (["--rmm-pool-size", site.rmm_pool] if site.rmm_pool else [])


def common_variables(site: Site) -> dict[str, str]:
    """The environment of the scheduler and of every worker."""
    settings: dict[str, Any] = {
        **own_cluster_config(None),
        "daskserve.drain.on-signals": True,
        "daskserve.drain.margin-s": site.margin_s,
    }
    del settings["distributed.scheduler.dashboard.bokeh-application.allow_websocket_origin"]
    if site.device == "cuda":
        settings["distributed.nanny.preload"] = [PRELOAD]  # it has no option for it
    if site.tls is not None:
        settings["distributed.comm.require-encryption"] = True
        settings["distributed.comm.tls.ca-file"] = site.tls.ca_file
        for who in ("scheduler", "worker", "client"):
            settings[f"distributed.comm.tls.{who}.cert"] = site.tls.cert
            settings[f"distributed.comm.tls.{who}.key"] = site.tls.key
    variables = {variable_of(name): _text(value) for name, value in settings.items()}
    # Weights come from the folder: whatever is not there is an error at once, not a download.
    return {**variables, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}


def _text(value: object) -> str:
    return json.dumps(value) if isinstance(value, list) else str(value)


def variable_of(setting: str) -> str:
    """The environment variable that sets a key of Dask's configuration."""
    return "DASK_" + setting.replace("-", "_").replace(".", "__").upper()


def check_hosts(site: Site, nodes: Mapping[int, list[Rank]]) -> None:
    """Every node needs a host (ConfigError)."""
    last = max(nodes)
    if len(site.hosts) <= last:
        raise ConfigError(
            f"the placement has nodes up to {last}, the site {len(site.hosts)} hosts: name one for"
            " each with --hosts, or as hosts in the site file"
        )

"""Target ``commands``: plain Dask commands, one script for the scheduler and one per host."""

from __future__ import annotations

import shlex

from daskserve.deploy.ranks import NO_DASHBOARD, Rank, check_hosts
from daskserve.deploy.script import head, node_script
from daskserve.deploy.site import Site
from daskserve.errors import ConfigError


def render(nodes: dict[int, list[Rank]], site: Site, folder: str) -> dict[str, str]:
    """Scripts by file name (ConfigError: a node without a host)."""
    check_hosts(site, nodes)
    if site.scheduler_port == 0:
        raise ConfigError("scheduler_port=0: workers on other hosts must know the port")
    scheduler_host = site.hosts[min(nodes)]
    address = scheduler_address(site, scheduler_host)
    scripts = {"scheduler.sh": scheduler_script(site, scheduler_host)}
    for node, ranks in nodes.items():
        host = site.hosts[node]
        listen = ["--interface", site.interface] if site.interface else ["--host", host]
        title = f"Node {node} of the placement: run it on {host}."
        where = [shlex.quote(word) for word in (address, *listen)]
        scripts[f"node-{node}.sh"] = node_script(title, ranks, site, where)
    return scripts


def scheduler_address(site: Site, host: str) -> str:
    return f"{site.protocol}://{host}:{site.scheduler_port}"


def scheduler_script(site: Site, host: str) -> str:
    """Starts the scheduler, without a dashboard, on the address that the workers reach."""
    where = ["--interface", site.interface] if site.interface else ["--host", host]
    words = ["dask", "scheduler", *where, "--port", str(site.scheduler_port), *NO_DASHBOARD]
    if site.protocol != "tcp":
        words += ["--protocol", site.protocol]
    words = [shlex.quote(word) for word in words]
    return head(f"The scheduler: run it on {host}.", site) + f"exec {' '.join(words)}\n"


def steps(nodes: dict[int, list[Rank]], site: Site, folder: str) -> list[str]:
    """What to do with the files, for people."""
    scheduler_host = site.hosts[min(nodes)]
    address = scheduler_address(site, scheduler_host)
    return [
        f"on {scheduler_host}: bash {folder}/scheduler.sh",
        *(f"on {site.hosts[node]}: bash {folder}/node-{node}.sh" for node in nodes),
        f"then: daskserve run-batch --scheduler {address} --placement {folder}/placement.yaml"
        f" --model {site.model or 'MODEL'} -i rows.jsonl -o answers.jsonl",
    ]

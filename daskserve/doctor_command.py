"""``daskserve doctor``: what is here, and what a placement lacks."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from daskserve.command_options import say

if TYPE_CHECKING:
    from daskserve.core.placement import Placement
    from daskserve.host.report import HostReport
    from daskserve.service.presence import Presence

_LACKING = 3


@click.command("doctor", short_help="Tell what is here and what a placement lacks.")
@click.option("--scheduler", metavar="ADDRESS", help="Look at this cluster, not at this host.")
@click.option("--placement", metavar="FILE", help="Say what it lacks here, or on the cluster.")
@click.option("--model", help="Whose weights and KV must fit  [default: that of the placement]")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def doctor_command(
    scheduler: str | None, placement: str | None, model: str | None, as_json: bool
) -> None:
    """Report processors, memory, GPUs, links and versions, and what a placement lacks.

    GPUs are seen with nvidia-ml-py. What is missing and needed for something is named with what
    it is for; a host without GPUs is not at fault.

    \b
    Exit codes: 0 nothing is lacking, 3 something is, 1 the cluster or a file cannot be read.
    """
    from daskserve.doctor.cluster import here, look_around
    from daskserve.doctor.lacks import missing_packages
    from daskserve.planner.placement_file import read_placement

    placed = read_placement(placement) if placement else None
    processes: list[Presence] = []
    if scheduler:
        processes, hosts = asyncio.run(look_around(scheduler, say))
    else:
        hosts = [here()]
    lacks, notes = _faults_of(processes), missing_packages(hosts)
    if placed is not None:
        lacks += _lacks_of(placed, model, processes, hosts, is_cluster=scheduler is not None)
    if as_json:
        found: dict[str, Any] = {
            "hosts": [host.to_record() for host in hosts],
            "processes": [asdict(process) for process in processes],
            "lacks": lacks,
            "notes": notes,
        }
        click.echo(json.dumps(found, indent=2))
    else:
        _show(hosts, processes, lacks, notes)
    raise SystemExit(_LACKING if lacks else 0)


def _faults_of(processes: list[Presence]) -> list[str]:
    from daskserve.service.agreement import refused_versions

    return refused_versions(processes)


def _lacks_of(
    placement: Placement,
    model: str | None,
    processes: list[Presence],
    hosts: list[HostReport],
    is_cluster: bool,
) -> list[str]:
    from daskserve.doctor.lacks import lacking_hosts, lacking_memory, slow_links
    from daskserve.planner.model_spec import ModelSpec
    from daskserve.service.agreement import misplaced_ranks, missing_ranks

    lacks: list[str] = []
    if is_cluster:
        workers = [p for p in processes if p.who not in ("client", "scheduler")]
        lacks += [f"{rank}: no worker" for rank in missing_ranks(placement, workers)]
        lacks += misplaced_ranks(placement, [w for w in workers if not w.error])
    if not is_cluster:
        lacks += lacking_hosts(placement, hosts)
    name = model or placement.model
    if name:
        lacks += lacking_memory(placement, ModelSpec.load(name), hosts)
    return lacks + slow_links(placement, hosts)


def _show(
    hosts: list[HostReport], processes: list[Presence], lacks: list[str], notes: list[str]
) -> None:
    from daskserve.doctor.tables import host_lines, worker_lines
    from daskserve.service.agreement import doubtful_versions

    lines = [line for host in hosts for line in host_lines(host)]
    lines += worker_lines(processes) if processes else []
    lines += [f"note: {note}" for note in (*notes, *doubtful_versions(processes))]
    lines += [f"lacking: {lack}" for lack in lacks]
    click.echo("\n".join(lines))

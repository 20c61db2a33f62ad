"""Shell scripts: what those of all targets have in common."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

from daskserve.deploy.ranks import Rank, common_variables, worker_command
from daskserve.deploy.site import Site

_WAIT = """\
# One process per rank; a signal goes on to each, and they drain before they end.
pids=()
start() { "$@" & pids+=("$!"); }
trap 'kill -TERM "${pids[@]}" 2>/dev/null || true' TERM INT
"""
_END = """\
status=0
for pid in "${pids[@]}"; do
  # A trapped signal ends `wait` early: the process may still be at work.
  while kill -0 "$pid" 2>/dev/null; do wait "$pid" || status=$?; done
done
exit "$status"
"""


def head(title: str, site: Site) -> str:
    """First lines of a script: what it is, the environment, and that the model is there."""
    lines = ["#!/usr/bin/env bash", f"# {title}", "# Written by `daskserve deploy`.", "set -e"]
    lines += [*site.activate, "set -u"]  # what enters environments may use unset variables
    lines += [f"export {name}={shlex.quote(v)}" for name, v in common_variables(site).items()]
    if site.model:
        model = shlex.quote(site.model)
        lines.append(
            f"test -r {model}/config.json || "
            f"{{ echo {shlex.quote(f'no model at {site.model} on this host')} >&2; exit 1; }}"
        )
    return "\n".join(lines) + "\n"


def node_script(title: str, ranks: Sequence[Rank], site: Site, where: Sequence[str]) -> str:
    """Starts all ranks of a node and waits for them.

    Parameters
    ----------
    where
        Words of the worker's command, quoted for the shell, that say where the scheduler is.
    """
    lines = []
    for index, rank in enumerate(ranks):
        cores = None
        if site.device == "cpu" and site.cpus_per_rank:
            cores = range(index * site.cpus_per_rank, (index + 1) * site.cpus_per_rank)
        variables = dict(rank.variables)
        if cores is not None:
            variables["OMP_NUM_THREADS"] = str(len(cores))
        lines += [
            "",
            f"# {_title(rank)}",
            command("start env", variables, rank, site, where, cores),
        ]
    return head(title, site) + _WAIT + "\n".join(lines) + "\n\n" + _END


def command(
    start: str,
    variables: Mapping[str, str],
    rank: Rank,
    site: Site,
    where: Sequence[str],
    cores: range | None,
) -> str:
    """The command of a rank over several lines."""
    mark = "@where@"
    words = worker_command(rank, site, [mark], cores)
    text = " ".join(map(shlex.quote, words)).replace(mark, " ".join(where))
    settings = [f"{name}={shlex.quote(value)}" for name, value in variables.items()]
    return " \\\n  ".join([start, *settings, text])


def _title(rank: Rank) -> str:
    return f"rank {rank.number} of {rank.instance}, node {rank.node}, GPU {rank.gpu}"

"""Target ``slurm``: one job for ``sbatch`` that has a task per node, and a script per node.

The scheduler runs in the batch step on the first node. Workers find it through a file on the
shared folder. SLURM's signal ahead of the end has every worker drain.
"""

from __future__ import annotations

import shlex

from daskserve.deploy.ranks import NO_DASHBOARD, Rank
from daskserve.deploy.script import head, node_script
from daskserve.deploy.site import Site
from daskserve.errors import ConfigError

_SCHEDULER_WAIT_S = 120

_BODY = """\
export DASKSERVE_SCHEDULER_FILE="$folder/scheduler-$SLURM_JOB_ID.json"

{scheduler} &
scheduler=$!
trap 'kill "$scheduler" 2>/dev/null || true; rm -f "$DASKSERVE_SCHEDULER_FILE"' EXIT
for ((waited_s = 0; waited_s < {wait_s}; waited_s++)); do
  test -s "$DASKSERVE_SCHEDULER_FILE" && break
  sleep 1
done
test -s "$DASKSERVE_SCHEDULER_FILE" || {{ echo "no scheduler after {wait_s} s" >&2; exit 1; }}

# SLURM_NODEID is which node of the job a task is on: it runs that node's ranks.
export DASKSERVE_NODES="{nodes}" DASKSERVE_FOLDER="$folder"
# shellcheck disable=SC2016  # expanded on each node
srun --nodes={num_nodes} --ntasks={num_nodes} --ntasks-per-node=1 --kill-on-bad-exit=0 \\
  bash -c 'read -ra nodes <<<"$DASKSERVE_NODES"
exec bash "$DASKSERVE_FOLDER/node-${{nodes[SLURM_NODEID]}}.sh"' &
workers=$!

# With arguments (`sbatch job.sbatch run-batch -i rows.jsonl -o answers.jsonl`) the job runs that
# command of daskserve and ends with it; without, it serves until its time is over.
status=0
if test $# -gt 0; then
  command=$1
  shift
  daskserve "$command" --scheduler "$DASKSERVE_SCHEDULER_FILE" \\
    --placement "$folder/placement.yaml"{model} "$@" || status=$?
  kill -TERM "$workers" 2>/dev/null || true
fi
wait "$workers" || true
exit "$status"
"""


def render(nodes: dict[int, list[Rank]], site: Site, folder: str) -> dict[str, str]:
    """The job and a script for each of its nodes, by file name (ConfigError)."""
    where = ["--scheduler-file", '"$DASKSERVE_SCHEDULER_FILE"']
    if site.interface:
        where += ["--interface", shlex.quote(site.interface)]
    else:
        where += ["--host", '"${SLURMD_NODENAME:-$(hostname)}"']
    scripts = {"job.sbatch": _job(nodes, site, folder)}
    for node, ranks in nodes.items():
        title = f"Node {node} of the placement; job.sbatch runs it there."
        scripts[f"node-{node}.sh"] = node_script(title, ranks, site, where)
    return scripts


def steps(nodes: dict[int, list[Rank]], site: Site, folder: str) -> list[str]:
    """What to do with the files, for people."""
    return [
        f"sbatch {folder}/job.sbatch run-batch -i rows.jsonl -o answers.jsonl",
        f"or: sbatch {folder}/job.sbatch, and --scheduler {folder}/scheduler-JOBID.json elsewhere",
    ]


def _job(nodes: dict[int, list[Rank]], site: Site, folder: str) -> str:
    first, rest = head("All ranks of the placement as one SLURM job.", site).split("\n", 1)
    scheduler = ["dask", "scheduler", "--port", str(site.scheduler_port), *NO_DASHBOARD]
    if site.interface:
        scheduler += ["--interface", site.interface]
    if site.protocol != "tcp":
        scheduler += ["--protocol", site.protocol]
    words = [*map(shlex.quote, scheduler), "--scheduler-file", '"$DASKSERVE_SCHEDULER_FILE"']
    if not site.interface:
        words += ["--host", '"${SLURMD_NODENAME:-$(hostname)}"']
    body = _BODY.format(
        scheduler=" ".join(words),
        wait_s=_SCHEDULER_WAIT_S,
        nodes=" ".join(map(str, nodes)),
        num_nodes=len(nodes),
        model=f" --model {shlex.quote(site.model)}" if site.model else "",
    )
    directives = "\n".join(f"#SBATCH {one}" for one in directives_of(nodes, site))
    return f"{first}\n{directives}\n{rest}folder={shlex.quote(folder)}\n{body}"


def directives_of(nodes: dict[int, list[Rank]], site: Site) -> list[str]:
    """What ``sbatch`` is asked for: whole nodes of the plan, and a signal before the end."""
    slurm = site.slurm
    most_gpus = max(rank.gpu + 1 for ranks in nodes.values() for rank in ranks)
    wanted = [
        "--job-name=daskserve",
        f"--nodes={len(nodes)}",
        "--ntasks-per-node=1",
        f"--time={slurm.walltime}",
        f"--signal=TERM@{site.margin_s}",
    ]
    if site.device == "cuda":
        wanted.append(f"--gres={slurm.gres}:{most_gpus}")
    optional = {
        "partition": slurm.partition,
        "account": slurm.account,
        "cpus-per-task": slurm.cpus_per_node,
        "mem": slurm.memory,
    }
    wanted += [f"--{name}={value}" for name, value in optional.items() if value]
    for one in slurm.extra:
        if "\n" in one:
            raise ConfigError(f"slurm.extra: {one!r} must be one line")
    return wanted + list(slurm.extra)

"""Target ``jobqueue``: a Python script with dask-jobqueue, one SLURM job per node.

The scheduler runs where the script does. Jobs may start at different times; the ranks of an
instance that spans nodes wait for each other.
"""

from __future__ import annotations

import json
import shlex

from daskserve.deploy.ranks import Rank, common_variables
from daskserve.deploy.script import node_script
from daskserve.deploy.site import Site
from daskserve.deploy.slurm import directives_of

_SCRIPT = '''\
"""The workers of a placement through dask-jobqueue: one SLURM job per node of it.

Written by `daskserve deploy`. Run it where jobs can be submitted, and leave it running:

    python cluster.py

It needs dask-jobqueue. Ctrl-C ends the jobs.
"""

import os
import signal

os.environ.update({variables})

from dask_jobqueue.slurm import SLURMJob  # Dask reads the environment once
from distributed import Scheduler, SpecCluster

FOLDER = {folder}
SCHEDULER_FILE = os.path.join(FOLDER, "scheduler.json")
NODES = {nodes}


def job(node):
    """One node of the placement: its script starts the ranks that belong there."""
    return {{
        "cls": SLURMJob,
        "options": {{
            "config_name": "slurm",
            "cores": {cores},
            "memory": {memory},
            "processes": 1,
            "walltime": {walltime},
            "queue": {partition},
            "account": {account},
            "job_extra_directives": {extra},
            "log_directory": FOLDER,
            # The script stands in for the one worker that dask-jobqueue would start.
            "job_script_prologue": [
                f"export DASKSERVE_SCHEDULER_FILE={{SCHEDULER_FILE}}",
                # The end of the job's time, for the workers to drain before it.
                'export DASK_DASKSERVE__DRAIN__ENDS_AT="${{SLURM_JOB_END_TIME:-None}}"',
                f"exec bash {{os.path.join(FOLDER, f'node-{{node}}.sh')}}",
            ],
        }},
    }}


def main():
    scheduler = {{
        "cls": Scheduler,
        "options": {{
            "port": {port},
            "protocol": {protocol},
            "interface": {interface},
            "scheduler_file": SCHEDULER_FILE,
            "dashboard": False,
            "dashboard_address": "127.0.0.1:0",
        }},
    }}
    workers = {{f"node-{{node}}": job(node) for node in NODES}}
    with SpecCluster(workers=workers, scheduler=scheduler) as cluster:
        print("scheduler at", cluster.scheduler_address, flush=True)
        signal.sigwait({{signal.SIGINT, signal.SIGTERM}})


if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, {{signal.SIGINT, signal.SIGTERM}})
    main()
'''


def render(nodes: dict[int, list[Rank]], site: Site, folder: str) -> dict[str, str]:
    """The script and what its jobs run, by file name."""
    where = ["--scheduler-file", '"$DASKSERVE_SCHEDULER_FILE"']
    if site.interface:
        where += ["--interface", shlex.quote(site.interface)]
    else:
        where += ["--host", '"${SLURMD_NODENAME:-$(hostname)}"']
    scripts = {"cluster.py": _script(nodes, site, folder)}
    for node, ranks in nodes.items():
        title = f"Node {node} of the placement; the jobs of cluster.py run it."
        scripts[f"node-{node}.sh"] = node_script(title, ranks, site, where)
    return scripts


def steps(nodes: dict[int, list[Rank]], site: Site, folder: str) -> list[str]:
    """What to do with the files, for people."""
    return [
        f"python {folder}/cluster.py",
        f"then: daskserve run-batch --scheduler {folder}/scheduler.json --placement"
        f" {folder}/placement.yaml --model {site.model or 'MODEL'} -i rows.jsonl -o answers.jsonl",
    ]


def _script(nodes: dict[int, list[Rank]], site: Site, folder: str) -> str:
    slurm = site.slurm
    # What dask-jobqueue has no option of its own for: nodes, tasks and time it sets itself.
    own = ("--job-name", "--nodes", "--ntasks", "--time", "--partition", "--account", "--mem=")
    extra = [one for one in directives_of(nodes, site) if not one.startswith(own)]
    extra = [one for one in extra if not one.startswith("--cpus-per-task")]
    # Such a job is the batch shell alone, which is signalled only when asked for by B.
    extra = [one.replace("--signal=", "--signal=B:") for one in extra]
    return _SCRIPT.format(
        variables=json.dumps(common_variables(site), indent=4),
        folder=json.dumps(folder),
        nodes=list(nodes),
        cores=slurm.cpus_per_node or max(map(len, nodes.values())),
        memory=json.dumps(slurm.memory or "16GB"),
        walltime=json.dumps(slurm.walltime),
        partition=repr(slurm.partition or None),
        account=repr(slurm.account or None),
        extra=json.dumps(extra),
        port=site.scheduler_port,
        protocol=json.dumps(f"{site.protocol}://"),
        interface=repr(site.interface or None),
    )

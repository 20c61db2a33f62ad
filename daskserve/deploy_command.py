"""``daskserve deploy``: scripts and manifests that start a placement on a cluster."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import click

from daskserve.errors import ConfigError

_TARGETS = ("commands", "slurm", "jobqueue", "kubernetes")


@click.command("deploy", short_help="Write what starts a placement on a cluster.")
@click.argument("placement_path", metavar="PLACEMENT")
@click.option("--target", type=click.Choice(_TARGETS), required=True, help="What starts it.")
@click.option("--site", "site_path", metavar="FILE", help="What the cluster is like, see below.")
@click.option("--hosts", metavar="NAMES", help="By number of the node, separated by commas.")
@click.option("--model", metavar="FOLDER", help="On storage that all hosts read at this path.")
@click.option("--device", type=click.Choice(("cuda", "cpu")), help="[default: cuda]")
@click.option("--protocol", type=click.Choice(("tcp", "ucx", "tls")), help="[default: tcp]")
@click.option(
    "-o",
    "--output",
    metavar="FOLDER",
    default="deploy",
    show_default=True,
    help="Where the files are written.",
)
@click.option("--dry-run", is_flag=True, help="Print the files and write nothing.")
def deploy_command(
    placement_path: str,
    target: str,
    site_path: str | None,
    hosts: str | None,
    output: str,
    dry_run: bool,
    **given: Any,
) -> None:
    """Write the files that start every rank of a placement on its host and GPU.

    Nothing is started: the last lines say how to. Workers carry their rank, their GPU and, on the
    heads, the resource of their role; `daskserve run-batch --scheduler ... --placement ...` then
    checks that what runs is what was placed.

    \b
    The site file is YAML; every key may be left out:
      hosts: [gpu-a, gpu-b]           # by number of the node
      device: cuda                    # or cpu
      model: /shared/models/llama-8b  # the same path on every host
      activate: [source /shared/venv/bin/activate]
      protocol: tcp                   # ucx: NVLink and InfiniBand; tls: with the section tls
      interface: ib0
      margin_s: 120                   # drain so long before the end of a job
      slurm: {partition: gpu, account: me, walltime: "04:00:00", gres: "gpu:h100"}
      kubernetes: {namespace: llm, image: registry/daskserve:1, claim: models}
    """
    from daskserve.deploy.site import read_site
    from daskserve.deploy.targets import deploy
    from daskserve.planner.placement_file import read_placement

    placement = read_placement(placement_path)
    changes = {name: value for name, value in given.items() if value is not None}
    if hosts is not None:
        changes["hosts"] = [host.strip() for host in hosts.split(",") if host.strip()]
    folder = Path(output).absolute()
    deployment = deploy(placement, read_site(site_path, changes), target, str(folder))
    if dry_run:
        for name, text in deployment.files.items():
            click.echo(f"# ---- {name}\n{text}")
    else:
        _write(deployment.files, placement_path, folder)
    for step in deployment.steps:
        click.echo(step, err=True)


def _write(files: dict[str, str], placement_path: str, folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            path = folder / name
            path.write_text(text, encoding="utf-8")
            if name.endswith((".sh", ".sbatch")):
                path.chmod(0o755)
        copy = folder / "placement.yaml"
        if not copy.exists() or not copy.samefile(placement_path):
            shutil.copyfile(placement_path, copy)
    except OSError as error:
        raise ConfigError(f"cannot write to {folder}: {error}") from error
    click.echo(f"written to {folder}: {', '.join([*files, 'placement.yaml'])}", err=True)

"""``daskserve calibrate``: measure this machine for the planner."""

from __future__ import annotations

from pathlib import Path

import click

from daskserve.command_options import engine_options, threads_option
from daskserve.core.instance import EngineConfig

NOT_TRUSTED = 3
"""Exit code when the fit is too bad to plan with."""


@click.command("calibrate", short_help="Fit the planner to this machine.")
@engine_options
@threads_option
@click.option("--quick", is_flag=True, help="Fewer points and repeats: one or two minutes.")
@click.option(
    "-o",
    "--output",
    default="profile.json",
    show_default=True,
    metavar="FILE",
    help="Where to write the profile.",
)
@click.option("--plot", metavar="FILE.png", help="Save the residuals too; needs matplotlib.")
def calibrate_command(
    model: str, dtype: str, threads: int | None, quick: bool, output: str, plot: str | None
) -> None:
    """Measure engine steps, KV transfers and overheads here, and fit the planner's model.

    Times prefill steps by number and length of prompts, decode steps by batch and context, and
    requests through a prefill and a decode process of their own. A third of the steps is held
    out of the fit to judge it. Takes some minutes; leave the machine alone meanwhile.

    \b
      daskserve calibrate --threads 1 -o profile.json
      daskserve plan --latency profile.json --gpus CPU:2 --prompt-tokens 256
          --output-tokens 64 --rate 1 --ttft 1 --tpot 0.1
      daskserve simulate placement.yaml --latency profile.json --workload trace.csv
          --ttft 1 --tpot 0.1

    \b
    Exit codes: 0 a profile was written, 3 it was written but is not trusted (plan and
    simulate refuse it without --allow-untrusted), 1 nothing was measured.
    """
    from rich.console import Console

    from daskserve.calibrate.grid import FULL, QUICK
    from daskserve.calibrate.plot import check_can_plot, save_plot
    from daskserve.calibrate.report import report
    from daskserve.calibrate.run import calibrate, check_writable, keep_budget

    check_writable(Path(output))
    if plot is not None:
        check_writable(Path(plot))
        check_can_plot(Path(plot))
    config = EngineConfig(model=model, dtype=dtype, num_threads=threads)
    found = calibrate(
        config, QUICK if quick else FULL, lambda line: click.echo(f"{line} ...", err=True)
    )
    found.write(output)
    console = Console()
    if not console.is_terminal:
        console.width = 120
    console.print(report(found))
    click.echo(f"profile written to {output}")
    if plot is not None:
        save_plot(found, Path(plot))
        click.echo(f"residuals drawn in {plot}")
    if found.is_trusted and not quick:
        keep_budget(config, found)
    if not found.is_trusted:
        raise SystemExit(NOT_TRUSTED)

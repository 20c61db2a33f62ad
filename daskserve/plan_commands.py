"""``daskserve plan`` and ``daskserve simulate``: the planner on the command line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from daskserve.errors import ConfigError
from daskserve.plan_inputs import (
    application_option,
    applications_of,
    latency_options,
    slo_of,
    slo_options,
    within_context,
    workload_of,
    workload_options,
)

if TYPE_CHECKING:
    from daskserve.planner.plan_request import PlanRequest
    from daskserve.planner.plan_result import Plan

INFEASIBLE = 3
"""Exit code when nothing meets the SLO, or the cluster is too small; 2 is click's, for usage."""

ALGORITHMS = ("auto", "1", "2", "3", "joint", "colocated", "single")
_MODEL_HELP = (
    "Preset (opt-13b, opt-66b, opt-175b, llama-3.1-8b, llama-3.1-70b, ...), or a directory "
    "with a Hugging Face config.json."
)


@click.command("plan", short_help="Find the placement for a workload and an SLO.")
@click.option("--model", help=_MODEL_HELP)
@click.option(
    "--gpus",
    multiple=True,
    required=True,
    metavar="TYPE:NxM[@PRICE]",
    help="N GPUs per node, M nodes: H100:8x4. Types: A100, H100, H200, B200, L40S, CPU (cores of "
    "this machine). @2.5 sets dollars per GPU and hour. Repeat for mixed clusters.",
)
@click.option("--network-gbps", type=float, help="Gbit/s of one node's network  [default: 400]")
@application_option
@workload_options
@slo_options
@click.option(
    "--highest-rate",
    is_flag=True,
    help="Not the fewest GPUs for a rate, but the highest rate for the GPUs.",
)
@click.option(
    "--max-gpus", type=click.IntRange(1), help="With --highest-rate: use at most so many."
)
@click.option(
    "--budget",
    type=float,
    metavar="DOLLARS",
    help="With --highest-rate: spend at most so much per hour.",
)
@click.option(
    "--objective",
    type=click.Choice(("gpus", "price")),
    default="gpus",
    show_default=True,
    help="What a plan for a rate keeps low.",
)
@click.option(
    "--algorithm",
    type=click.Choice(ALGORITHMS),
    default="auto",
    show_default=True,
    help="auto chooses by the KV bandwidth that is needed and there.",
)
@latency_options
@click.option(
    "-o",
    "--output",
    default="placement.yaml",
    show_default=True,
    metavar="FILE",
    help="Where to write the placement.",
)
@click.option(
    "--report",
    metavar="FILE",
    help="Also write ranking, curves and costs as JSON: daskserve dashboard --plan FILE shows "
    "them. Simulates the curves.",
)
def plan_command(**given: Any) -> None:
    """Find the placement that serves a workload within an SLO on the fewest GPUs.

    \b
    Lengths and rate:
      daskserve plan --model llama-3.1-70b --gpus H100:8x8 --prompt-tokens 512
          --output-tokens 256 --rate 50 --ttft 250ms --tpot 50ms
    A trace, prefill and decode on different GPUs, cheapest:
      daskserve plan --model llama-3.1-8b --gpus H100:8x2 --gpus L40S:8x2
          --workload trace.csv --ttft 0.5 --tpot 0.05 --objective price

    Writes the placement and prints a ranking and why. Every candidate is simulated until it is
    steady, with several seeds.

    \b
    Exit codes: 0 a placement was found, 3 infeasible (the best that can be reached is
    printed and no placement is written), 1 wrong input or no data, 2 wrong usage.
    """
    from daskserve.planner.planning import plan, plan_highest_rate

    request = _request(given)
    if given["highest_rate"]:
        answer = plan_highest_rate(request, given["max_gpus"], given["budget"])
    else:
        answer = plan(request)
    if answer.status == "no_data":
        raise ConfigError(f"{answer.reason}; give --rate or a trace with arrival times")
    _print_plan(answer)
    if given["report"]:
        _write_report(answer, request, Path(given["report"]))
    if answer.status != "found":
        click.echo(f"infeasible: {answer.reason}", err=True)
        raise SystemExit(INFEASIBLE)
    _write_placement(answer, Path(given["output"]))


def _request(given: dict[str, Any]) -> PlanRequest:
    from daskserve.planner.command_inputs import (
        calibrated,
        cluster_of,
        latency_model,
        model_named,
    )
    from daskserve.planner.plan_request import PlanRequest
    from daskserve.planner.slo_classes import SLOClasses

    _check_direction(given)
    applications = applications_of(given)
    for one in applications:
        given = {**given, "model": one.model}
    measured = calibrated(given["latency"], given["allow_untrusted"])
    model = model_named(given["model"], measured)
    cluster = cluster_of(given["gpus"], given["network_gbps"])
    workload = workload_of(given, applications)
    if given["drop_too_long"]:
        workload = within_context(workload, model)
    prompt = workload.arrays()[1]
    typical = int(prompt.mean()) if len(prompt) else 1024
    if cluster.num_nodes == 1 and given["network_gbps"] is not None:
        raise ConfigError("--network-gbps changes nothing on a single node: leave it out")
    if given["objective"] == "price" and len(cluster.groups) == 1:
        raise ConfigError("--objective price with one GPU type is the same as gpus: leave it out")
    network = cluster.network_bandwidth if cluster.num_nodes > 1 else None
    slo = slo_of(given, applications)
    if measured is not None:
        classes = SLOClasses.of(slo)
        slo = replace(classes, slos=tuple(map(measured.less_dispatch, classes.slos)))
        cluster = measured.on(cluster)
        dispatch_ms = measured.dispatch_s * 1e3
        click.echo(f"TTFT is planned for without {dispatch_ms:.1f} ms of dispatch", err=True)
    return PlanRequest(
        model,
        cluster,
        workload,
        slo,
        rate=given["rate"],
        objective=given["objective"],
        latency=measured or latency_model(given["latency"], network, typical),
        algorithm=given["algorithm"],
        seeds=tuple(range(given["seeds"] or 3)),
    )


def _check_direction(given: dict[str, Any]) -> None:
    if given["highest_rate"]:
        if given["rate"] is not None:
            raise ConfigError("--highest-rate finds the rate: leave --rate out")
        if given["objective"] != "gpus":
            raise ConfigError("--objective is for a given rate; --highest-rate has --budget")
    else:
        for name, flag in (("max_gpus", "--max-gpus"), ("budget", "--budget")):
            if given[name] is not None:
                raise ConfigError(f"{flag} goes with --highest-rate; a plan for a rate is minimal")


def _print_plan(answer: Plan) -> None:
    from daskserve.planner.slo_classes import SLOClasses

    rate = "The highest rate" if answer.is_highest else f"{answer.rate:.4g} requests/s"
    click.echo(
        f"{rate} within {SLOClasses.of(answer.slo)}; P prefill, D decode, C colocated instances"
    )
    rows = [("", "way", "instances", "GPUs", "on nodes", "req/s", "$/h", "$/M tokens")]
    for option in answer.options:
        solution = option.solution
        mark = "*" if option is answer.chosen else "-" if not option.is_usable else ""
        if solution is None:
            rows.append((mark, option.name, "none", "", "", "", "", ""))
            continue
        occupied = str(option.num_gpus_occupied) if option.placement else "too few"
        price = answer.price_per_million_tokens(option)
        figures = (f"{solution.rate:.4g}", f"{option.price_per_hour:.2f}", f"{price:.3f}")
        instances = str(solution.all_instances)
        rows.append((mark, option.name, instances, str(option.num_gpus), occupied, *figures))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        cells = [
            cell.ljust(width) if i < 3 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        click.echo("  ".join(cells).rstrip())
    for option in answer.options:
        if option.rejected:
            click.echo(f"- {option.name}: {option.rejected}")
    for option in answer.options:
        if len(option.classes) > 1:
            shares = "; ".join(map(str, option.classes))
            click.echo(f"- {option.name}: {shares}")
    for line in answer.explanation:
        click.echo(f"- {line}")


def _write_placement(answer: Plan, path: Path) -> None:
    from daskserve.planner.placement_file import placement_to_yaml

    chosen = answer.chosen
    comment = f"{chosen}\n{answer.rate:.4g} requests/s at {chosen.price_per_hour:.2f} $/h"
    try:
        path.write_text(placement_to_yaml(answer.placement, comment), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}") from error
    click.echo(f"placement written to {path}")


def _write_report(answer: Plan, request: PlanRequest, path: Path) -> None:
    from daskserve.planner.plan_file import report_of, write_plan

    write_plan(report_of(answer, request), path)
    click.echo(f"report written to {path}")


@click.command("simulate", short_help="Tell what a placement would reach.")
@click.argument("placement_path", metavar="PLACEMENT")
@click.option("--model", help=f"{_MODEL_HELP}  [default: that of the placement]")
@application_option
@workload_options
@slo_options
@latency_options
@click.option(
    "--requests",
    type=click.IntRange(100),
    help="Length of a drawn trace [default: as for plan], or of the part that is replayed.",
)
@click.option(
    "--timeline", metavar="FILE", help="Write every request's stages of the first seed as CSV."
)
def simulate_command(placement_path: str, **given: Any) -> None:
    """Simulate a placement under a workload: attainment and percentiles.

    PLACEMENT is a file that daskserve plan wrote, or one of your own. A trace with arrival
    times is replayed as it is; with --rate, requests are drawn from it at that rate.

    Exit codes: 0 the SLO is met (with classes, by every one), 3 it is not, 1 wrong input or no
    data, 2 wrong usage.
    """
    from daskserve.planner.command_inputs import calibrated, latency_model, model_named
    from daskserve.planner.placement_file import read_placement
    from daskserve.planner.replay import replay

    placement = read_placement(placement_path)
    applications = applications_of(given)
    for one in applications:
        given = {**given, "model": one.model}
    name = given["model"] or placement.model
    measured = calibrated(given["latency"], given["allow_untrusted"])
    if not name and measured is None:
        raise ConfigError(f"{placement_path} does not name its model: give --model")
    model = model_named(name, measured)
    workload = workload_of(given, applications)
    if given["drop_too_long"]:
        workload = within_context(workload, model)
    model.check_lengths(workload.arrays()[1] + workload.arrays()[2])
    if given["rate"] is None and given["seeds"] is not None:
        raise ConfigError("--seeds is for traces drawn at --rate; a replayed trace has none")
    network = placement.network_bandwidth if placement.num_nodes > 1 else None
    typical = int(workload.arrays()[1].mean()) if len(workload) else 1024
    result = replay(
        placement,
        model,
        measured or latency_model(given["latency"], network, typical),
        workload,
        slo_of(given, applications),
        rate=given["rate"],
        num_requests=given["requests"],
        seeds=tuple(range(given["seeds"] or 3)),
    )
    click.echo(str(result))
    if given["timeline"] is not None:
        result.write_timeline(given["timeline"])
        click.echo(f"timeline written to {given['timeline']}")
    if not result.is_met:
        raise SystemExit(INFEASIBLE)

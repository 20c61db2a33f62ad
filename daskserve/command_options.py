"""Options that several commands share: the model, where it runs, and the SLO."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from daskserve.core.instance import DEVICES, DTYPES, EngineConfig
from daskserve.core.slo import SLO
from daskserve.errors import ConfigError, ModelError
from daskserve.models import DEFAULT_MODEL

if TYPE_CHECKING:
    from daskserve.service import Service
    from daskserve.service.replan_options import ReplanOptions

MODEL_HELP = (
    "smollm2-135m, a local directory, a Hub id (owner/name), tiny-random-<architecture>, "
    "or mock (fixed step times, no weights)."
)


def options(*given: Callable[..., Any]) -> Callable[..., Any]:
    """Several click options as one decorator."""

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(given):
            command = option(command)
        return command

    return decorate


_dtype_option = click.option(
    "--dtype",
    type=click.Choice(DTYPES),
    default="bfloat16",
    show_default=True,
    help="float32 gives the tokens of transformers' generate; bfloat16 is faster.",
)
engine_options = options(
    click.option("--model", default=DEFAULT_MODEL, show_default=True, help=MODEL_HELP),
    _dtype_option,
)
placed_engine_options = options(
    click.option(
        "--model",
        help=f"{MODEL_HELP}  [default: that of --placement, or else {DEFAULT_MODEL}]",
    ),
    _dtype_option,
)
device_option = click.option(
    "--device",
    type=click.Choice(DEVICES),
    default="auto",
    show_default=True,
    help="Where instances compute; auto takes CUDA where PyTorch and the machine have it.",
)
threads_option = click.option(
    "--threads",
    type=click.IntRange(1),
    help="Threads of one instance; on 2 cores 1 for --prefill 1 --decode 1, 2 for "
    "--colocated 1  [default: all cores]",
)
placement_options = options(
    click.option(
        "--placement",
        metavar="FILE",
        help="Start what this file of daskserve plan says, on this machine; with --scheduler, "
        "wait until its workers are what it says.",
    ),
    click.option("--prefill", type=click.IntRange(1), help="Prefill instances  [default: 1]"),
    click.option("--decode", type=click.IntRange(1), help="Decode instances  [default: 1]"),
    click.option(
        "--colocated",
        type=click.IntRange(1),
        help="Instances that do both phases, instead of --prefill and --decode.",
    ),
    click.option(
        "--scheduler",
        metavar="ADDRESS",
        help="Use this Dask scheduler (tcp://host:port, or a scheduler file); its workers carry "
        "the resources PREFILL and DECODE, or COLOCATED.",
    ),
    click.option(
        "--protocol",
        metavar="NAME",
        help="Of the connections of the instances started here: tcp, or ucx with the package "
        "distributed-ucxx  [default: tcp]",
    ),
)
slo_options = options(
    click.option("--slo-ttft", metavar="TIME", help="Limit on time to first token: 0.25 or 250ms."),
    click.option("--slo-tpot", metavar="TIME", help="Limit on time per output token after it."),
)


replan_options = options(
    click.option(
        "--replan",
        is_flag=True,
        help="Let instances change their role as the traffic changes; needs the SLO options.",
    ),
    click.option(
        "--replan-dry-run", is_flag=True, help="Decide and write decisions down, change nothing."
    ),
    click.option(
        "--replan-max-instances",
        type=click.IntRange(3),
        metavar="N",
        help="Start up to so many instances, and stop what is not needed  [default: neither]",
    ),
    click.option(
        "--decisions", metavar="FILE", help="Append every decision to this file, a JSON line each."
    ),
    click.option(
        "--latency",
        metavar="FILE",
        help="Step times for replanning: profile.json of daskserve calibrate; mock needs none.",
    ),
)


def replan_of(given: dict[str, Any]) -> ReplanOptions | None:
    """From the options above; None without ``--replan`` (ConfigError)."""
    if not (given["replan"] or given["replan_dry_run"]):
        for name in ("decisions", "latency", "replan_max_instances"):
            if given[name] is not None:
                raise ConfigError(f"--{name.replace('_', '-')} is for --replan; give that too")
        return None
    from daskserve.service.replan_options import ReplanOptions

    if given["slo_ttft"] is None:
        raise ConfigError("--replan needs the limits to plan for: --slo-ttft and --slo-tpot")
    return ReplanOptions(
        is_dry_run=given["replan_dry_run"],
        decisions=given["decisions"],
        latency=given["latency"],
        max_instances=given["replan_max_instances"],
    )


def slo_of(given: dict[str, Any]) -> SLO | None:
    """From ``--slo-ttft`` and ``--slo-tpot`` (ConfigError)."""
    from daskserve.planner.command_inputs import seconds

    texts = {"TTFT": given["slo_ttft"], "TPOT": given["slo_tpot"]}
    if all(text is None for text in texts.values()):
        return None
    if None in texts.values():
        raise ConfigError("--slo-ttft and --slo-tpot go together: an answer must meet both")
    limits = {}
    for name, text in texts.items():
        limits[name], warning = seconds(name, text)
        if warning:
            click.echo(warning, err=True)
    return SLO(ttft_s=limits["TTFT"], tpot_s=limits["TPOT"])


def say(line: str) -> None:
    """For whoever waits at a terminal; standard output is for results."""
    click.echo(line, err=True)


def check_placement(given: dict[str, Any]) -> None:
    """Options that contradict each other are refused before anything starts (ConfigError)."""
    own = [f"--{name}" for name in ("prefill", "decode", "colocated") if given[name]]
    if given["placement"] and own:
        raise ConfigError(f"--placement says what to start; leave out {', '.join(own)}")
    if given["scheduler"] and given["protocol"]:
        raise ConfigError(
            f"--protocol: that of {given['scheduler']} is in its address; leave it out"
        )
    if given["scheduler"] and own:
        raise ConfigError(
            f"{', '.join(own)}: on an existing scheduler the workers' resources say what they "
            "do; leave it out"
        )
    if given["colocated"] and len(own) > 1:
        raise ConfigError("give --colocated, or --prefill and --decode, not both")


def engine_config(given: dict[str, Any]) -> EngineConfig:
    """Of the model that is asked for, or else the one that the placement was planned for.

    Raises
    ------
    ConfigError
        The placement cannot be read, or is for a model that cannot be loaded by its name.
    """
    if given["model"] or not given["placement"]:
        return EngineConfig(given["model"] or DEFAULT_MODEL, given["dtype"], given["device"])
    from daskserve.models import resolve
    from daskserve.planner.placement_file import read_placement

    model = read_placement(given["placement"]).model or DEFAULT_MODEL
    try:
        resolve(model)
    except ModelError as error:
        raise ConfigError(
            f"{given['placement']} was planned for {model!r}, which is not a model that can be"
            " loaded by that name: say with --model where it is"
        ) from error
    return EngineConfig(model, given["dtype"], given["device"])


def open_service(
    config: EngineConfig,
    given: dict[str, Any],
    slo: SLO | None,
    asynchronous: bool = False,
    flippable: bool = False,
) -> Service:
    """The service that the options ask for; ``flippable`` as of `Service.local`."""
    from daskserve.placed import check_roles, engines_of, shapes_of
    from daskserve.planner.placement_file import read_placement
    from daskserve.service import Expected, Service

    placement = read_placement(given["placement"]) if given["placement"] else None
    configs = {} if placement is None else engines_of(placement, config)
    if given["scheduler"]:
        if placement is not None:
            check_roles(placement)
        expected = Expected(configs, placement, say)
        return Service.attach(
            given["scheduler"], config, slo=slo, asynchronous=asynchronous, expected=expected
        )
    if placement is not None:
        instances = shapes_of(placement)
    elif given["colocated"]:
        instances = {"prefill": 0, "decode": 0, "colocated": given["colocated"]}
    else:
        instances = {"prefill": given["prefill"] or 1, "decode": given["decode"] or 1}
    return Service.local(
        **instances,
        config=config,
        protocol=given["protocol"],
        slo=slo,
        asynchronous=asynchronous,
        flippable=flippable,
        configs=configs,
    )

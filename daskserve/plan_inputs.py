"""What ``plan`` and ``simulate`` are asked: the options that both take, and what they stand for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from daskserve.errors import ConfigError, InvalidParameter

if TYPE_CHECKING:
    from daskserve.core.slo import SLO
    from daskserve.planner.applications import Application
    from daskserve.planner.model_spec import ModelSpec
    from daskserve.planner.workload import Workload


def _options(*options: Any) -> Any:
    def decorate(command: Any) -> Any:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


slo_options = _options(
    click.option("--ttft", metavar="TIME", help="Limit on time to first token: 0.25 or 250ms."),
    click.option("--tpot", metavar="TIME", help="Limit on time per output token after it."),
    click.option(
        "--attainment",
        type=float,
        help="Share of requests that must meet both limits  [default: 0.9]",
    ),
    click.option(
        "--slo-class",
        "slo_classes",
        multiple=True,
        metavar="NAME:TTFT:TPOT[:ATTAINMENT]",
        help="Instead: limits of one class of requests, named in the trace's column slo_class. "
        "Repeat; every class must meet its own target.",
    ),
)
workload_options = _options(
    click.option(
        "--workload",
        "workload_path",
        metavar="FILE",
        help="Trace: CSV or JSONL (Azure, Mooncake, DistServe or plain columns arrival_s, "
        "prompt_tokens, output_tokens and perhaps slo_class), may be gzipped.",
    ),
    click.option(
        "--prompt-tokens", type=click.IntRange(1), help="Instead of a file: prompt length."
    ),
    click.option(
        "--output-tokens", type=click.IntRange(1), help="Instead of a file: answer length."
    ),
    click.option("--rate", type=float, help="Requests/s  [default: that of the file]"),
    click.option(
        "--drop-too-long",
        is_flag=True,
        help="Leave out requests that are longer than the model's context.",
    ),
    click.option("--seeds", type=click.IntRange(1), help="Simulated traces per rate  [default: 3]"),
)
latency_options = _options(
    click.option(
        "--latency",
        default="roofline",
        show_default=True,
        metavar="NAME|FILE",
        help="Step times: roofline, distserve-a100, distserve-a100-vllm, a profile.json of "
        "daskserve calibrate (sets the model, and what CPU stands for), or a CSV of measured steps "
        "with columns phase, tokens, batch, tp, latency_s.",
    ),
    click.option(
        "--allow-untrusted",
        is_flag=True,
        help="Use a profile.json that is marked as not trusted.",
    ),
)
application_option = click.option(
    "--application",
    "applications",
    multiple=True,
    metavar="NAME[=SHARE]",
    help="Row of DistServe's Table 1: sets model, SLO and lengths. Repeat with shares for a mix, "
    "in which each is an SLO class: chatbot-opt-66b=0.7.",
)


def applications_of(given: dict[str, Any]) -> dict[Application, float]:
    """Applications with their shares; one alone is all there is."""
    from daskserve.planner.applications import application

    texts = given["applications"]
    names = ("model", "ttft", "tpot", "workload_path", "prompt_tokens", "output_tokens",
             "slo_classes")  # fmt: skip
    for name in names if texts else ():
        if given[name]:
            flag = {"workload_path": "workload", "slo_classes": "slo-class"}.get(name, name)
            raise ConfigError(f"--application sets --{flag.replace('_', '-')}: leave it out")
    found: dict[Application, float] = {}
    for text in texts:
        name, _, share = text.partition("=")
        one = application(name)
        if one in found:
            raise ConfigError(f"--application {name} is given twice")
        if bool(share) != (len(texts) > 1):
            raise ConfigError(
                f"--application {text}: write =SHARE for each of several, and only then"
            )
        found[one] = _number(f"--application {text}", share) if share else 1.0
    return found


def workload_of(given: dict[str, Any], applications: dict[Application, float]) -> Workload:
    """The trace, lengths or applications that were given."""
    from daskserve.planner.applications import mixed
    from daskserve.planner.traces import read_workload
    from daskserve.planner.workload import Workload

    if len(applications) > 1:
        return mixed({one.name: share for one, share in applications.items()})
    for one in applications:
        return one.all_lengths()
    lengths = [given["prompt_tokens"], given["output_tokens"]]
    if given["workload_path"] is not None:
        if any(lengths):
            raise ConfigError("give --workload, or --prompt-tokens and --output-tokens, not both")
        return read_workload(given["workload_path"])
    if not all(lengths):
        raise ConfigError("give --workload FILE, or both --prompt-tokens and --output-tokens")
    return Workload.from_arrays([0.0], [lengths[0]], [lengths[1]], name="uniform")


def within_context(workload: Workload, model: ModelSpec) -> Workload:
    """Without requests that are too long, whose number is printed."""
    kept = workload.within(model.context_tokens)
    click.echo(
        f"{len(workload) - len(kept)} of {len(workload)} requests are longer than the context of"
        f" {model.context_tokens} tokens and were left out",
        err=True,
    )
    return kept


def slo_of(given: dict[str, Any], applications: dict[Application, float]) -> SLO | dict[str, SLO]:
    """One SLO for all requests, or one for each class."""
    from dataclasses import replace

    attainment = 0.9 if given["attainment"] is None else given["attainment"]
    if applications:
        by_name = {one.name: replace(one.slo, attainment=attainment) for one in applications}
        return by_name if len(by_name) > 1 else by_name.popitem()[1]
    if given["slo_classes"]:
        return _classes(given)
    for name in ("ttft", "tpot"):
        if given[name] is None:
            raise ConfigError(f"give --{name}: a plan needs both limits, or --slo-class")
    return _limits(given["ttft"], given["tpot"], attainment)


def _classes(given: dict[str, Any]) -> dict[str, SLO]:
    for name in ("ttft", "tpot", "attainment"):
        if given[name] is not None:
            form = "NAME:TTFT:TPOT:ATTAINMENT"
            raise ConfigError(f"--slo-class {form} has limits of its own: leave --{name} out")
    found: dict[str, SLO] = {}
    for text in given["slo_classes"]:
        head = f"--slo-class {text}"
        name, *parts = [part.strip() for part in text.split(":")]
        if not name or len(parts) not in (2, 3):
            raise ConfigError(f"{head} must look like chat:0.25:50ms or chat:0.25:50ms:0.95")
        if name in found:
            raise ConfigError(f"{head}: the class {name} is given twice")
        attainment = _number(head, parts[2]) if len(parts) == 3 else 0.9
        try:
            found[name] = _limits(parts[0], parts[1], attainment)
        except (ConfigError, InvalidParameter) as error:
            raise ConfigError(f"{head}: {error}") from error
    return found


def _limits(ttft: str, tpot: str, attainment: float) -> SLO:
    from daskserve.core.slo import SLO
    from daskserve.planner.command_inputs import seconds

    values = []
    for name, text in (("TTFT", ttft), ("TPOT", tpot)):
        value, warning = seconds(name, text)
        if warning:
            click.echo(f"warning: {warning}", err=True)
        values.append(value)
    return SLO(values[0], values[1], attainment)


def _number(head: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"{head}: {text!r} is not a number") from None

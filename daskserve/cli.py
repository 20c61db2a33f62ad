"""The ``daskserve`` command; Dask lists it as ``dask serve-llm`` too."""

from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from daskserve.core.instance import DTYPES, EngineConfig
from daskserve.core.params import SamplingParams
from daskserve.core.slo import SLO
from daskserve.errors import ConfigError, DaskserveError
from daskserve.models import DEFAULT_MODEL
from daskserve.plan_commands import plan_command, simulate_command

if TYPE_CHECKING:
    from daskserve.service import Service

_INTERRUPTED = 130


class _Group(click.Group):
    """Turns the errors that daskserve raises on purpose into one line and exit code 1."""

    def invoke(self, context: click.Context) -> Any:
        try:
            return super().invoke(context)
        except DaskserveError as error:
            click.echo(f"error: {error}", err=True)
            context.exit(1)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="daskserve")
def main() -> None:
    """LLM inference on Dask, prefill and decode on separate workers."""


_MODEL_HELP = (
    "smollm2-135m, a local directory, a Hub id (owner/name), tiny-random-<architecture>, "
    "or mock (fixed step times, no weights)."
)


def _options(*options: Callable[..., Any]) -> Callable[..., Any]:
    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


_engine_options = _options(
    click.option("--model", default=DEFAULT_MODEL, show_default=True, help=_MODEL_HELP),
    click.option(
        "--dtype",
        type=click.Choice(DTYPES),
        default="bfloat16",
        show_default=True,
        help="float32 gives the tokens of transformers' generate; bfloat16 is faster.",
    ),
)
_placement_options = _options(
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
        help="Use this Dask scheduler (tcp://host:port); its workers carry the resources "
        "PREFILL and DECODE, or COLOCATED.",
    ),
)
_sampling_options = _options(
    click.option("--max-tokens", type=int, help="Most output tokens of a row  [default: 128]"),
    click.option("--temperature", type=float, help="0 is greedy, up to 2  [default: 0]"),
    click.option("--top-p", type=float, help="Above 0, at most 1  [default: 1]"),
    click.option("--top-k", type=int, help="0 keeps all tokens  [default: 0]"),
    click.option("--seed", type=int, help="Same seed, same answers  [default: drawn per row]"),
    click.option("--stop", multiple=True, help="String that ends the text; may be repeated."),
    click.option("--ignore-eos", is_flag=True, default=None, help="Always give max-tokens tokens."),
)


@main.command("run-batch")
@click.option(
    "-i",
    "--input",
    "source",
    required=True,
    metavar="PATH",
    help="Rows: .jsonl, or .parquet (a file or a folder) with a column prompt or messages.",
)
@click.option("-o", "--output", required=True, metavar="PATH", help="Answers: .jsonl, or .parquet.")
@_engine_options
@_placement_options
@_sampling_options
@click.option("--slo-ttft", type=float, metavar="SECONDS", help="Limit on time to first token.")
@click.option("--slo-tpot", type=float, metavar="SECONDS", help="Limit on time per output token.")
@click.option("--max-in-flight", type=int, help="Rows at work  [default: 2 per decode slot]")
@click.option("--ordered", is_flag=True, help="Write rows in input order, when all are done.")
@click.option("--restart", is_flag=True, help="Overwrite the output and forget the earlier run.")
@click.option("--quiet", is_flag=True, help="No progress and no summary.")
def run_batch_command(source: str, output: str, **given: Any) -> None:
    """Answer every row of a file; run it again to resume.

    \b
    A line of the input is one of
      {"prompt": "..."}
      {"messages": [{"role": "user", "content": "..."}]}
      {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions",
       "body": {"messages": [...], "max_tokens": 64}}
    and may give custom_id (default: line-<n>), max_tokens, temperature, top_p,
    top_k, seed, stop and ignore_eos; the options below are for lines that do not.

    Every row gets exactly one line in the output, a bad row an error line. The folder
    <output>.job remembers what is written: after a crash, Ctrl-C or a full disk the same
    command goes on.

    One prefill and one decode instance are the default. On a machine of few cores
    --colocated 1 needs half the memory for weights and can be faster: see benchmarks/batch.py.

    \b
    Exit codes: 0 all rows answered, 3 some rows failed, 1 the job did not finish,
    130 stopped by Ctrl-C.
    """
    from daskserve.batch import BatchJob

    config = EngineConfig(model=given["model"], dtype=given["dtype"])
    params, slo = _sampling(given), _slo(given)
    _check_placement(given)
    _catch_signals()
    try:
        with BatchJob(
            source,
            Path(output),
            config,
            params=params,
            slo=slo,
            ordered=given["ordered"],
            restart=given["restart"],
        ) as job:
            summary = job.complete
            if summary is None:
                with _service(config, given, slo) as service:
                    summary = job.run(service, given["max_in_flight"], not given["quiet"])
    except KeyboardInterrupt:
        click.echo("stopped; run the same command again to go on", err=True)
        raise SystemExit(_INTERRUPTED) from None
    if not given["quiet"]:
        click.echo(str(summary))
    raise SystemExit(summary.exit_code)


def _catch_signals() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as in a shell's background
            signal.signal(number, _interrupt)


def _interrupt(signal_number: int, frame: Any) -> NoReturn:
    # Connections are cut from here on, perhaps of a cluster that is half started; what Dask and
    # asyncio say of that helps nobody.
    for name in ("asyncio", "distributed", "tornado"):
        logging.getLogger(name).setLevel(logging.CRITICAL + 1)
    sys.unraisablehook = lambda unraisable: None
    raise KeyboardInterrupt


def _sampling(given: dict[str, Any]) -> SamplingParams:
    names = SamplingParams.__dataclass_fields__
    return SamplingParams(**{n: given[n] for n in names if given[n] not in (None, ())})


def _slo(given: dict[str, Any]) -> SLO | None:
    ttft_s, tpot_s = given["slo_ttft"], given["slo_tpot"]
    if ttft_s is None and tpot_s is None:
        return None
    if ttft_s is None or tpot_s is None:
        raise ConfigError("--slo-ttft and --slo-tpot go together: a row must meet both")
    return SLO(ttft_s=ttft_s, tpot_s=tpot_s)


def _check_placement(given: dict[str, Any]) -> None:
    own = [f"--{name}" for name in ("prefill", "decode", "colocated") if given[name]]
    if given["scheduler"] and own:
        raise ConfigError(
            f"{', '.join(own)}: on an existing scheduler the workers' resources say what they "
            "do; leave it out"
        )
    if given["colocated"] and len(own) > 1:
        raise ConfigError("give --colocated, or --prefill and --decode, not both")


def _service(config: EngineConfig, given: dict[str, Any], slo: SLO | None) -> Service:
    from daskserve.service import Service

    if given["scheduler"]:
        return Service.attach(given["scheduler"], config=config)
    if given["colocated"]:
        return Service.local(
            prefill=0, decode=0, colocated=given["colocated"], config=config, slo=slo
        )
    prefill, decode = given["prefill"] or 1, given["decode"] or 1
    return Service.local(prefill=prefill, decode=decode, config=config, slo=slo)


@main.command("fetch-model")
@click.argument("name", default=DEFAULT_MODEL)
def fetch_model_command(name: str) -> None:
    """Download or build a model into the cache and print its folder.

    NAME is smollm2-135m (the default; about 100 MB, checked and converted once), a Hub id
    (owner/name), a local directory, or tiny-random-<architecture>.
    """
    from daskserve.models import resolve

    click.echo(resolve(name))


@main.command("profile-prefill")
@_engine_options
@click.option(
    "--threads",
    type=click.IntRange(1),
    help="Threads of one instance; on 2 cores 1 for --prefill 1 --decode 1, 2 for "
    "--colocated 1  [default: all cores]",
)
def profile_prefill_command(model: str, dtype: str, threads: int | None) -> None:
    """Measure L_m, the prompt tokens per step beyond which prefill gains nothing.

    The result is kept in the cache; instances with this model, dtype and number of threads on
    this machine batch prompts up to it. Takes about a minute for the default model.
    """
    from daskserve.workers.profile import PrefillPoint, profile_prefill

    def show(point: PrefillPoint) -> None:
        click.echo(
            f"{point.num_prompts} x {point.prompt_tokens} tokens: {point.tokens_per_s:.0f} tok/s",
            err=True,
        )

    config = EngineConfig(model=model, dtype=dtype, num_threads=threads)
    click.echo(profile_prefill(config, show).table())


main.add_command(plan_command)
main.add_command(simulate_command)

if __name__ == "__main__":
    main()

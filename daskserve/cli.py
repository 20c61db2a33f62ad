"""The ``daskserve`` command; Dask lists it as ``dask serve-llm`` too."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import click

from daskserve.bench_command import bench_command
from daskserve.calibrate_command import calibrate_command
from daskserve.command_options import (
    check_placement,
    device_option,
    engine_config,
    engine_options,
    open_service,
    options,
    placed_engine_options,
    placement_options,
    slo_of,
    slo_options,
    threads_option,
)
from daskserve.core.instance import EngineConfig
from daskserve.core.params import SamplingParams
from daskserve.dashboard_command import dashboard_command
from daskserve.deploy_command import deploy_command
from daskserve.doctor_command import doctor_command
from daskserve.errors import DaskserveError
from daskserve.models import DEFAULT_MODEL
from daskserve.plan_commands import plan_command, simulate_command
from daskserve.replay_command import replay_command
from daskserve.serve_command import serve_command

_INTERRUPTED = 130
_STOPPED = "stopped; run the same command again to go on"


class _Interrupted(KeyboardInterrupt):
    """Of a kind of its own: a plain one that passes through ``exec``, as in making a dataclass,
    has CPython end the process by the signal later on, even if it was caught."""


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
    # At INFO, with a traceback, for every connection that is closed while something is sent.
    logging.getLogger("distributed.batched").setLevel(logging.WARNING)


_sampling_options = options(
    click.option("--max-tokens", type=int, help="Most output tokens of a row  [default: 128]"),
    click.option("--temperature", type=float, help="0 is greedy, up to 2  [default: 0]"),
    click.option("--top-p", type=float, help="Above 0, at most 1  [default: 1]"),
    click.option("--top-k", type=int, help="0 keeps all tokens  [default: 0]"),
    click.option("--seed", type=int, help="Same seed, same answers  [default: drawn per row]"),
    click.option("--stop", multiple=True, help="String that ends the text; may be repeated."),
    click.option("--ignore-eos", is_flag=True, default=None, help="Always give max-tokens tokens."),
)


@main.command("run-batch", short_help="Answer every row of a file; again to resume.")
@click.option(
    "-i",
    "--input",
    "source",
    required=True,
    metavar="PATH",
    help="Rows: .jsonl, or .parquet (a file or a folder) with a column prompt or messages.",
)
@click.option("-o", "--output", required=True, metavar="PATH", help="Answers: .jsonl, or .parquet.")
@placed_engine_options
@device_option
@placement_options
@_sampling_options
@slo_options
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
    check_placement(given)
    config = engine_config(given)
    params, slo = _sampling(given), slo_of(given)
    _catch_signals(_exit_now)  # there is nothing yet that would have to be closed
    import daskserve.service  # noqa: F401 - an import may swallow what a signal raises
    from daskserve.batch import BatchJob

    _catch_signals(_interrupt)
    _fill_standard_streams()
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
                with open_service(config, given, slo) as service:
                    summary = job.run(service, given["max_in_flight"], not given["quiet"])
    except _Interrupted:
        click.echo(_STOPPED, err=True)
        raise SystemExit(_INTERRUPTED) from None
    if not given["quiet"]:
        click.echo(str(summary))
    raise SystemExit(summary.exit_code)


def _catch_signals(handler: Callable[[int, Any], NoReturn]) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as in a shell's background
            signal.signal(number, handler)


def _fill_standard_streams() -> None:
    """Where the caller closed one (``2>&-``), no file of ours may get its number: workers, and
    whatever writes messages, would write into it."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number, so this one


def _exit_now(signal_number: int, frame: Any) -> NoReturn:
    """Asked twice: what is written needs no closing, and the workers end with their parent."""
    os.write(2, f"{_STOPPED}\n".encode())
    os._exit(_INTERRUPTED)


def _interrupt(signal_number: int, frame: Any) -> NoReturn:
    _catch_signals(_exit_now)
    # Connections are cut from here on, perhaps of a cluster that is half started; what Dask and
    # asyncio say of that helps nobody.
    for name in ("asyncio", "daskserve", "distributed", "tornado"):
        logging.getLogger(name).setLevel(logging.CRITICAL + 1)
    sys.unraisablehook = lambda unraisable: None
    raise _Interrupted


def _sampling(given: dict[str, Any]) -> SamplingParams:
    names = SamplingParams.__dataclass_fields__
    return SamplingParams(**{n: given[n] for n in names if given.get(n) not in (None, ())})


@main.command("fetch-model", short_help="Put a model into the cache.")
@click.argument("name", default=DEFAULT_MODEL)
def fetch_model_command(name: str) -> None:
    """Download or build a model into the cache and print its folder.

    NAME is smollm2-135m (the default; about 100 MB, checked and converted once), a Hub id
    (owner/name), a local directory, or tiny-random-<architecture>.
    """
    from daskserve.models import resolve

    click.echo(resolve(name))


@main.command("profile-prefill", short_help="Measure L_m on this machine.")
@engine_options
@threads_option
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


main.add_command(serve_command)
main.add_command(bench_command)
main.add_command(calibrate_command)
main.add_command(plan_command)
main.add_command(simulate_command)
main.add_command(dashboard_command)
main.add_command(deploy_command)
main.add_command(doctor_command)
main.add_command(replay_command)

if __name__ == "__main__":
    main()

"""``daskserve bench``: load on a server from the command line, and the figures of it."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from daskserve.bench_options import answer_options, load_options, target_options
from daskserve.command_options import slo_of, slo_options
from daskserve.errors import ConfigError

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager

    from daskserve.bench.offered import Offered
    from daskserve.bench.prompts import Prompts
    from daskserve.bench.results import Results
    from daskserve.bench.session import Session
    from daskserve.bench.target import Target
    from daskserve.core.slo import SLO
    from daskserve.planner.workload import Workload

_SEARCH_S, _LONGEST = 60.0, 10
"""Seconds of one run of a search, and how many times that a run of few requests may last."""

_TOLERANCE = 0.05
_NUM_REQUESTS, _PROMPT_TOKENS, _OUTPUT_TOKENS = 200, "512", "128"
_FAILED_REQUESTS = 3
_INTERRUPTED = 130


@click.command("bench", short_help="Put load on a server and measure it.")
@target_options
@load_options
@slo_options
@answer_options
def bench_command(**given: Any) -> None:
    """Put load on an OpenAI-compatible server and measure what it makes of it.

    Requests leave at their arrival times whatever the server does (an open loop), from this one
    process; how late it was itself is printed too. TTFT, TPOT and the other lines mean what they
    mean in vLLM's bench serve. A request that failed has missed every limit.

    \b
      daskserve bench --rate 4 --requests 200 --prompt-tokens 512 --output-tokens 128
      daskserve bench --rate 4 --duration 60 --slo-ttft 0.5 --slo-tpot 0.1
      daskserve bench --find-goodput --slo-ttft 0.5 --slo-tpot 0.1
      daskserve bench --url http://gpu7:8000 --workload trace.csv --rate 20

    \b
    Exit codes: 0 all requests were answered (or a goodput was found), 3 some failed (or no
    rate meets the limits), 1 the server cannot be used, 130 stopped by Ctrl-C (what was
    measured is printed).
    """
    try:
        import httpx  # noqa: F401
    except ImportError:
        raise ConfigError("daskserve bench needs httpx: pip install daskserve[bench]") from None
    import asyncio

    slo = slo_of(given)
    if slo is not None:
        slo = replace(slo, attainment=given["attainment"])
    _check_output(given["output"])
    given["slo_scales"] = _scales(given["slo_scales"])
    if given["recorded"]:
        code = _show_recorded(given, slo)
    elif given["find_goodput"]:
        code = asyncio.run(_find_goodput(given, slo))
    else:
        code = asyncio.run(_bench(given, slo))
    raise SystemExit(code)


async def _bench(given: dict[str, Any], slo: SLO | None) -> int:
    from daskserve.bench.results import Results
    from daskserve.bench.summary import failure_lines

    for name in ("max_rate", "tolerance"):
        if given[name] is not None:
            raise ConfigError(f"--{name.replace('_', '-')} goes with --find-goodput")
    workload = _workload(given)
    async with _opened(given) as session:
        records, lag = await session.loop.run(workload)
    results = Results.of([records], session.loop.started_unix_s)
    _show(given, results, slo, given["rate"], session.num_instances)
    for line in (*failure_lines(records), *lag.lines()):
        click.echo(line)
    _write(given, results)
    if session.stop.is_set():
        return _INTERRUPTED
    return 0 if results.is_ok.all() else _FAILED_REQUESTS


async def _find_goodput(given: dict[str, Any], slo: SLO | None) -> int:
    from daskserve.bench import goodput
    from daskserve.bench.results import Results
    from daskserve.bench.search import MIN_REQUESTS, RateSearch

    if slo is None:
        raise ConfigError("--find-goodput needs --slo-ttft and --slo-tpot")
    if given["requests"] is not None:
        raise ConfigError("--find-goodput runs for --duration at every rate: leave --requests out")
    duration_s = given["duration"] or _SEARCH_S
    offered = _offered(given)
    search = RateSearch(
        given["rate"] or 1.0,
        cap=given["max_rate"] or math.inf,
        floor=MIN_REQUESTS / (_LONGEST * duration_s),
        tolerance=_TOLERANCE if given["tolerance"] is None else given["tolerance"],
    )
    async with _opened(given) as session:
        click.echo(goodput.HEADER)
        trials = await goodput.find_goodput(
            session.loop,
            offered,
            slo,
            search,
            duration_s,
            session.stop,
            lambda trial: click.echo(goodput.trial_line(trial)),
        )
    num_instances = given["instances"] or session.num_instances
    best = goodput.best_of(trials)
    if best is not None:
        _show(given, best.results, slo, best.rate, num_instances)
    click.echo("\n".join(goodput.verdict_lines(trials, slo, search, num_instances)))
    _write(given, Results.of([t.records for t in trials], session.loop.started_unix_s))
    if session.stop.is_set():
        return _INTERRUPTED
    return 0 if best else _FAILED_REQUESTS


def _show_recorded(given: dict[str, Any], slo: SLO | None) -> int:
    from daskserve.bench.results import Results

    parts = [Results.read(path) for path in given["recorded"]]
    results = parts[0] if len(parts) == 1 else Results.joined(parts)
    _show(given, results, slo, None, None)
    _write(given, results)
    return 0 if results.is_ok.all() else _FAILED_REQUESTS


def _opened(given: dict[str, Any]) -> AbstractAsyncContextManager[Session]:
    from daskserve.bench.session import opened

    return opened(
        _target(given),
        _prompts(given),
        timeout_s=given["timeout"],
        ready_timeout_s=given["ready_timeout"],
        is_quiet=given["quiet"],
    )


def _show(
    given: dict[str, Any],
    results: Results,
    slo: SLO | None,
    rate: float | None,
    num_instances: int | None,
) -> None:
    from daskserve.bench.summary import Summary
    from daskserve.bench.tables import SCALES, scale_lines, stage_lines

    summary = Summary.of(results, slo, rate, given["instances"] or num_instances)
    lines = [*summary.lines(), *stage_lines(results)]
    if slo is not None and len(results):
        lines += scale_lines(results, slo, given["slo_scales"] or SCALES)
    click.echo("\n".join(lines))


def _check_output(path: str | None) -> None:
    """Before minutes are spent on what cannot be kept."""
    if path is None:
        return
    if not path.endswith(".nc"):
        raise ConfigError(f"--output {path} must end in .nc")
    if not Path(path).resolve().parent.is_dir():
        raise ConfigError(f"cannot write {path}: there is no such folder")


def _scales(text: str | None) -> tuple[float, ...]:
    try:
        scales = tuple(float(part) for part in (text or "").split(",") if part.strip())
    except ValueError:
        scales = (0.0,)
    if not all(math.isfinite(scale) and scale > 0 for scale in scales):
        raise ConfigError(f"--slo-scales {text!r} must be numbers above 0, as in 0.5,1,2")
    return scales


def _write(given: dict[str, Any], results: Results) -> None:
    if given["output"]:
        results.write(given["output"])
        click.echo(f"{len(results)} requests written to {given['output']}")


def _target(given: dict[str, Any]) -> Target:
    from daskserve.bench.target import Target, load_key

    extra = {"temperature": given["temperature"]}
    if given["ignore_eos"]:
        extra["ignore_eos"] = True
    return Target(
        given["url"],
        given["model"],
        given["endpoint"],
        load_key(given["api_key_file"]),
        given["ca_file"],
        extra=extra,
    )


def _prompts(given: dict[str, Any]) -> Prompts:
    from daskserve.bench.prompts import FileLines, RandomTokens, RandomWords, token_ids

    is_chat = given["endpoint"] == "chat"
    if given["prompt_file"] is not None:
        return FileLines(given["prompt_file"], is_chat)
    if is_chat:
        return RandomWords(given["seed"])
    return RandomTokens(given["seed"], *token_ids(given["token_ids"]))


def _offered(given: dict[str, Any]) -> Offered:
    from daskserve.bench.offered import Lengths, Offered, arrival_process
    from daskserve.planner.traces import read_workload

    prompt, output = (
        Lengths.read(f"--{name}-tokens", given[f"{name}_tokens"] or default)
        for name, default in (("prompt", _PROMPT_TOKENS), ("output", _OUTPUT_TOKENS))
    )
    name, burstiness = given["arrivals"], given["burstiness"]
    if burstiness is not None:
        if name not in (None, "gamma"):
            raise ConfigError(f"--burstiness is that of gamma arrivals, not of {name}")
        name = "gamma"
    if given["workload_path"] is None:
        if name == "workload":
            raise ConfigError("--arrivals workload needs --workload FILE")
        process = arrival_process(name or "poisson", burstiness or 1.0)
        return Offered.uniform(prompt, output, process, given["seed"])
    if given["prompt_tokens"] or given["output_tokens"]:
        raise ConfigError("give --workload, or --prompt-tokens and --output-tokens, not both")
    trace = read_workload(given["workload_path"], seed=given["seed"])
    has_times = trace.rate is not None
    if name == "workload" and not has_times:
        raise ConfigError(f"{given['workload_path']} has no arrival times; choose other --arrivals")
    if name is None and has_times:
        name = "workload"
    process = None if name == "workload" else arrival_process(name or "poisson", burstiness or 1.0)
    return Offered(trace, process, given["seed"])


def _workload(given: dict[str, Any]) -> Workload:
    from daskserve.bench.offered import first_seconds

    rate, duration_s, num_requests = given["rate"], given["duration"], given["requests"]
    offered = _offered(given)
    if duration_s is None:
        if num_requests is None and offered.arrivals is not None:
            num_requests = _NUM_REQUESTS
        return offered.at(rate, num_requests)
    if num_requests is not None:
        raise ConfigError("give --requests or --duration, not both")
    if rate == math.inf:
        raise ConfigError("--duration needs a finite --rate")
    if offered.arrivals is None:
        return first_seconds(offered.at(rate, None), duration_s)
    return offered.at(rate, max(1, round((rate or 0) * duration_s)))

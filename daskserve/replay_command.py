"""``daskserve replay``: a day of traffic in minutes, with replanning and without."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from daskserve.command_options import options, slo_of, slo_options
from daskserve.core.instance import EngineConfig
from daskserve.errors import ConfigError

if TYPE_CHECKING:
    from daskserve.core.slo import SLO
    from daskserve.planner.workload import Workload
    from daskserve.replanning.outlook import Outlook
    from daskserve.replanning.split import Split
    from daskserve.replay.played import Played

SYNTHETIC = "two-mixes"
_PHASES = 6
_ROWS = 24  # of the table

_engine_options = options(
    click.option("--model", default="mock", show_default=True, help="As for daskserve serve."),
    click.option("--max-batch-size", type=click.IntRange(1), help="Requests in a decode step."),
    click.option("--mock-prefill", type=float, default=0.4, show_default=True, help="Seconds."),
    click.option("--mock-decode", type=float, default=0.1, show_default=True, help="Seconds."),
    click.option(
        "--latency", metavar="FILE", help="profile.json of the model; the mock needs none."
    ),
)


@click.command("replay", short_help="Play a day, compressed, with replanning on and off.")
@click.argument("day", metavar="DAY")
@click.option(
    "--against",
    type=click.Choice(["simulator", "service"]),
    default="simulator",
    show_default=True,
    help="The service starts on this machine and takes as long as the compressed day.",
)
@click.option("--speed", type=float, default=60.0, show_default=True, help="Times faster.")
@click.option("--rate", type=float, help="Mean requests/s when played: leave some out at random.")
@click.option(
    "--split", "split_text", default="3P3D", show_default=True, help="Instances at the beginning."
)
@click.option(
    "--replan",
    type=click.Choice(["on", "off", "both"]),
    default="both",
    show_default=True,
    help="off keeps the split; in the simulator the best split that stays is shown too.",
)
@click.option("--seeds", type=click.IntRange(1), default=1, show_default=True, help="Days played.")
@click.option("--record", metavar="FILE", help="Recording of the last day, for the dashboard.")
@click.option("--decisions", metavar="FILE", help="Append its decisions, a JSON line each.")
@_engine_options
@slo_options
def replay_command(day: str, **given: Any) -> None:
    """Play a day of traffic in minutes and see what replanning makes of it.

    \b
    DAY is a trace as for daskserve plan --workload, or
      two-mixes   six phases, in turns long prompts with short answers and the reverse
    """
    from daskserve.replanning.split import Split
    from daskserve.replay.played import decision_lines, table

    slo = slo_of(given)
    if slo is None:
        raise ConfigError("give the limits that count as goodput: --slo-ttft and --slo-tpot")
    config = _engine(given)
    split = Split.parse(given["split_text"])
    for seed in range(given["seeds"]):
        workload = _day(day, given["speed"], given["rate"], seed)
        if given["against"] == "simulator":
            days = _simulated(workload, _outlook(config, slo, given), split, given["replan"])
        else:
            days = asyncio.run(_served(workload, config, slo, split, given))
        click.echo(f"day {seed + 1}: {len(workload)} requests in {days[0].span_s:.0f} s")
        window_s = max(days[0].span_s / _ROWS, 1.0)
        for line in (*table(days, window_s), *decision_lines(days[0])):
            click.echo(line)
        _compare(days)
    _write(days[0], slo, window_s, given)


def _engine(given: dict[str, Any]) -> EngineConfig:
    config = EngineConfig(
        model=given["model"],
        mock_prefill_s=given["mock_prefill"],
        mock_decode_s=given["mock_decode"],
    )
    size = given["max_batch_size"]
    return config if size is None else replace(config, max_batch_size=size)


def _day(day: str, speed: float, rate: float | None, seed: int) -> Workload:
    from daskserve.planner.traces import read_workload
    from daskserve.replay.days import compressed, two_mixes

    if day == SYNTHETIC:
        phase_s = 86_400.0 / _PHASES / speed
        rates = (8.0, 6.0) if rate is None else (rate, rate)
        return two_mixes(rates, phase_s, _PHASES, seed)
    return compressed(read_workload(day, seed=seed), speed, rate, seed)


def _outlook(config: EngineConfig, slo: SLO, given: dict[str, Any]) -> Outlook:
    from daskserve.core.instance import (
        DEFAULT_BLOCK_SIZE,
        HOST_KV_BYTES,
        InstanceInfo,
        Role,
    )
    from daskserve.service.replan_options import ReplanOptions, outlook_of

    num_blocks = config.num_kv_blocks or (config.kv_memory_bytes or HOST_KV_BYTES) // 1024
    infos = [
        InstanceInfo(
            Role.PREFILL,
            config.model,
            config.dtype,
            0,
            config.block_size or DEFAULT_BLOCK_SIZE,
            num_blocks,
            config.max_batch_size,
            "",
        )
    ] * 3
    return outlook_of(config, slo, ReplanOptions(latency=given["latency"]), infos)


def _simulated(workload: Workload, outlook: Outlook, split: Split, replan: str) -> list[Played]:
    from daskserve.replay.in_simulator import best_static, play_replanned, play_static

    days = []
    if replan != "off":
        days.append(play_replanned(workload, outlook, split))
    if replan != "on":
        days.append(play_static(workload, outlook, split))
        best = best_static(workload, outlook, split.num_instances)
        if best.name != days[-1].name:
            days.append(best)
    return days


async def _served(
    workload: Workload, config: EngineConfig, slo: SLO, split: Split, given: dict[str, Any]
) -> list[Played]:
    from daskserve.replay.against_service import play
    from daskserve.service import Service
    from daskserve.service.replan_options import ReplanOptions

    days = []
    for is_on in {"on": (True,), "off": (False,), "both": (True, False)}[given["replan"]]:
        async with Service.local(
            prefill=split.num_prefill,
            decode=split.num_decode,
            config=config,
            slo=slo,
            flippable=True,
            asynchronous=True,
        ) as service:
            if is_on:
                await service.replan(
                    ReplanOptions(decisions=given["decisions"], latency=given["latency"])
                )
            record = Path(given["record"]) if given["record"] and not days else None
            name = "replanning" if is_on else str(split)
            days.append(await play(service, workload, slo, name, record))
    return days


def _compare(days: list[Played]) -> None:
    first = days[0]
    for other in days[1:]:
        ratio = first.goodput_rps() / max(other.goodput_rps(), 1e-9)
        click.echo(f"{first.name} serves {ratio:.2f} times the requests of {other.name} in time")
    click.echo(f"{first.name}: {len(first.changes)} changes, {first.num_failed} failed requests")


def _write(day: Played, slo: SLO, window_s: float, given: dict[str, Any]) -> None:
    from daskserve.observe.observation import Recorder
    from daskserve.replanning.record import Journal

    if given["against"] == "service":  # it was written while it was played
        return
    if given["record"]:
        recorder = Recorder(Path(given["record"]))
        day.record(recorder, slo, window_s)
        recorder.close()
    if given["decisions"]:
        journal = Journal(given["decisions"])
        for decision in day.decisions:
            journal.write(decision)

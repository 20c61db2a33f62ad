"""Replanning: a step change of the mix, flips under load, stationary load, and a day of two mixes.

Mock instances with slow steps, so that the machine's own speed hardly counts: a prefill step of
0.4 s, a decode step of 0.1 s for up to eight requests. ``--quick`` plays the step change in the
simulator only, flips four times, and simulates fewer hours. Quiet machine: about 25 minutes, or
one with ``--quick``. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from daskserve import EngineConfig, Service
from daskserve.core.instance import DEFAULT_BLOCK_SIZE, DEFAULT_BUDGET_TOKENS, Role
from daskserve.core.placement import Parallelism
from daskserve.core.slo import SLO
from daskserve.planner.latency.mock import mock_step_times
from daskserve.planner.workload import Workload
from daskserve.replanning.decision import Trigger
from daskserve.replanning.drift import DriftSettings
from daskserve.replanning.outlook import Outlook
from daskserve.replanning.split import Split
from daskserve.replay.against_service import play
from daskserve.replay.days import CODE, CONVERSATION, joined, stretch, two_mixes
from daskserve.replay.in_simulator import best_static, play_replanned, play_static
from daskserve.replay.played import Played, decision_lines
from daskserve.service.replan_options import ReplanOptions

CONFIG = EngineConfig(
    model="mock", mock_prefill_s=0.4, mock_decode_s=0.1, max_batch_size=8, num_kv_blocks=4096
)
LIMITS = SLO(ttft_s=2.0, tpot_s=0.15)
OUTLOOK = Outlook(
    {Parallelism(): mock_step_times(CONFIG, 4096 * DEFAULT_BLOCK_SIZE, DEFAULT_BUDGET_TOKENS)},
    LIMITS,
)
BEFORE, AFTER = Split(4, 2), Split(2, 4)
CODE_S, CONVERSATION_S = 110.0, 130.0
RATE = 5.0
RESTORED_S = 60.0
FLIP_RATE = 1.0


@dataclass(frozen=True, slots=True)
class Figure:
    """One number and what it must reach."""

    name: str
    value: float
    unit: str
    target: str
    ok: bool


def step_workload(seed: int) -> Workload:
    rng = np.random.default_rng(seed)
    return joined(
        [
            stretch(CODE, RATE, 0.0, CODE_S, rng),
            stretch(CONVERSATION, RATE, CODE_S, CONVERSATION_S, rng),
        ]
    )


def conversation_part(workload: Workload) -> Workload:
    """The requests after the step, from a clock of their own."""
    arrival_s, prompt, output = workload.arrays()
    late = arrival_s >= CODE_S
    return Workload.from_arrays(arrival_s[late] - CODE_S, prompt[late], output[late])


def step_figures(day: Played, best: Played, where: str) -> list[Figure]:
    """Of a step change: how soon it was answered, and what was restored."""
    print("\n".join(decision_lines(day)))
    answers = [d for d in day.changes if d.at_unix_s - day.began_unix_s >= CODE_S]
    answered_s = answers[0].at_unix_s - day.began_unix_s - CODE_S if answers else float("inf")
    restored = day.goodput_rps(CODE_S + RESTORED_S)
    reachable = best.goodput_rps(RESTORED_S)
    share = restored / max(reachable, 1e-9)
    print(f"{where}: {restored:.2f} requests/s in time, {best.name} all along {reachable:.2f}")
    pause_s = max((d.outcome.pause_s for d in day.changes if d.outcome), default=0.0)
    return [
        Figure(f"step change answered, {where}", answered_s, "s", "<= 60", answered_s <= 60),
        Figure(f"goodput restored, {where}", share, "of the best", ">= 0.9", share >= 0.9),
        Figure(f"failed requests, {where}", day.num_failed, "", "0", day.num_failed == 0),
        Figure(f"pause, {where}", pause_s, "s", "<= 2", pause_s <= 2),
    ]


def simulated_step(seed: int) -> list[Figure]:
    workload = step_workload(seed)
    day = play_replanned(workload, OUTLOOK, BEFORE)
    best = best_static(conversation_part(workload), OUTLOOK, BEFORE.num_instances)
    return step_figures(day, best, "simulator")


async def real_step(seed: int) -> list[Figure]:
    workload = step_workload(seed)
    day = await served(workload, BEFORE, "replanning", is_replanned=True)
    later = conversation_part(workload)
    found = best_static(later, OUTLOOK, BEFORE.num_instances)
    best = await served(later, Split.parse(found.name), found.name)
    return step_figures(day, best, "six mock instances")


async def served(workload: Workload, split: Split, name: str, is_replanned: bool = False) -> Played:
    async with local(split) as service:
        if is_replanned:
            await service.replan(ReplanOptions())
        return await play(service, workload, LIMITS, name)


def local(split: Split) -> Service:
    return Service.local(
        prefill=split.num_prefill,
        decode=split.num_decode,
        config=CONFIG,
        cores=None,
        slo=LIMITS,
        flippable=True,
        asynchronous=True,
    )


def mixed(seconds: float, seed: int) -> Workload:
    """Both mixes side by side."""
    rng = np.random.default_rng(seed)
    parts = [
        stretch(mix, FLIP_RATE / 2, 0.0, seconds, rng).arrays() for mix in (CODE, CONVERSATION)
    ]
    columns = [np.concatenate(column) for column in zip(*parts, strict=True)]
    order = np.argsort(columns[0])
    return Workload.from_arrays(*(column[order] for column in columns))


async def flips(num_flips: int, constant_s: float, seed: int) -> list[Figure]:
    """2P1D to 1P2D and back under load, then constant load with the replanner at work."""
    async with local(Split(2, 1)) as service:
        loading = asyncio.create_task(play(service, mixed(6.0 * num_flips, seed), LIMITS, "flips"))
        told: list[dict[str, float]] = []
        for number in range(num_flips):
            await asyncio.sleep(1.0)
            role = Role.DECODE if number % 2 == 0 else Role.PREFILL
            other = Role.PREFILL if number % 2 == 0 else Role.DECODE
            instances = [i.address for i in await service.info() if i.role is other]
            told.append(await service.flip(instances[0], role))
        during = await loading
        await service.replan(ReplanOptions())
        after = await play(service, mixed(constant_s, seed + 1), LIMITS, "constant")
    pause_s = max(one["pause_s"] for one in told)
    took_s = max(one["took_s"] for one in told)
    num_failed = during.num_failed + after.num_failed
    print(f"{num_flips} flips, the longest {took_s:.1f} s, the longest pause {pause_s:.2f} s")
    print("\n".join(decision_lines(after)))
    gaps = [np.diff(np.sort(day.first_token_s)).max() for day in (during, after)]
    print(f"longest gap between first tokens: {gaps[0]:.1f} s with flips, {gaps[1]:.1f} s without")
    changes = len(after.changes)
    return [
        Figure(f"failed requests, {num_flips} flips", num_failed, "", "0", num_failed == 0),
        Figure(f"pause, {num_flips} flips", pause_s, "s", "<= 2", pause_s <= 2),
        Figure(f"changes in {constant_s:.0f} s of constant load", changes, "", "0", changes == 0),
    ]


def stationary(hours: float, seed: int) -> list[Figure]:
    """Hours of load that does not change, in the simulator, the fast path included."""
    rng = np.random.default_rng(seed)
    rate, changes, alarms = 0.5, 0, 0
    piece_h = min(hours, 100.0)
    for _ in range(round(hours / piece_h)):
        count = int(rate * piece_h * 3600)
        is_code = rng.random(count) < 0.5
        lengths = [
            np.where(is_code, code, conversation)
            for code, conversation in zip(
                CODE.lengths(count, rng), CONVERSATION.lengths(count, rng), strict=True
            )
        ]
        arrival_s = np.cumsum(rng.exponential(1 / rate, count))
        workload = Workload.from_arrays(arrival_s, *lengths)
        day = play_replanned(workload, OUTLOOK, Split(3, 3), tick_s=10.0)
        changes += len(day.changes)
        alarms += sum(d.trigger is Trigger.DRIFT for d in day.decisions)
    stated = DriftSettings().false_alarms_per_hour * hours
    print(f"{hours:.0f} h without change: {alarms} alarms of {stated:g} stated, {changes} changes")
    name = f"changes in {hours:.0f} simulated hours of stationary load"
    return [Figure(name, changes, "", f"<= {stated:g}", changes <= stated)]


def days(seeds: range) -> list[Figure]:
    """Two mixes in turns: replanning against the best split that stays, known afterwards."""
    ratios = []
    for seed in seeds:
        workload = two_mixes((8.0, 6.0), 300.0, 6, seed)
        day = play_replanned(workload, OUTLOOK, Split(3, 3))
        best = best_static(workload, OUTLOOK, 6)
        start = play_static(workload, OUTLOOK, Split(3, 3))
        ratios.append(day.goodput_rps() / best.goodput_rps())
        print(
            f"day {seed}: requests/s in time {day.goodput_rps():.2f} with {len(day.changes)}"
            f" changes, {best.goodput_rps():.2f} with {best.name} all day,"
            f" {start.goodput_rps():.2f} with 3P3D all day"
        )
    least = min(ratios)
    return [Figure("day of two mixes, worst seed", least, "x best static", ">= 1.1", least >= 1.1)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parts = ("step", "flips", "stationary", "days")
    parser.add_argument("--part", choices=parts, action="append", help="only this; repeat")
    given = parser.parse_args()
    chosen, quick = given.part or parts, given.quick
    begun = time.monotonic()
    figures: list[Figure] = []
    if "days" in chosen:
        figures += days(range(1 if quick else 3))
    if "step" in chosen:
        figures += simulated_step(0)
        if not quick:
            figures += asyncio.run(real_step(0))
    if "flips" in chosen:
        figures += asyncio.run(flips(*((4, 10.0) if quick else (20, 600.0)), 0))
    if "stationary" in chosen:
        figures += stationary(20.0 if quick else 1000.0, 0)
    print(f"took {time.monotonic() - begun:.0f} s")
    for one in figures:
        print(
            f"{'ok  ' if one.ok else 'FAIL'} {one.name}: {one.value:.3g} {one.unit} ({one.target})"
        )
    print(json.dumps([_record(one) for one in figures]))


def _record(one: Figure) -> dict[str, Any]:
    value = one.value if np.isfinite(one.value) else None
    return {
        "name": one.name,
        "value": value,
        "unit": one.unit,
        "target": one.target,
        "ok": bool(one.ok),
    }


if __name__ == "__main__":
    main()

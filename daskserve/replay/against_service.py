"""A day against the real service: requests leave when they arrive, whatever the service does."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import numpy as np

from daskserve.core.params import SamplingParams
from daskserve.core.slo import SLO
from daskserve.errors import DaskserveError
from daskserve.observe import Window
from daskserve.observe.observation import Observation, Recorder
from daskserve.planner.workload import Workload
from daskserve.replay.played import Played
from daskserve.service import Service

_WINDOW_S = 10.0
_TIMEOUT_S = 300.0
"""An answer that takes longer is given up, and counts as failed."""


async def play(
    service: Service, workload: Workload, slo: SLO, name: str, record: Path | None = None
) -> Played:
    """Send every request of a workload at its time; what came of each, once all have ended.

    Parameters
    ----------
    service
        Asynchronous, open.
    record
        A recording of the service, which the dashboard opens; None writes none.
    """
    arrival_s, prompts, outputs = workload.arrays()
    count = len(arrival_s)
    met, failed = np.zeros(count, bool), np.zeros(count, bool)
    first_s = np.full(count, np.nan)
    prompt_ids = service.tokenizer.encode("a")[:1]
    started_at, began_unix_s = time.monotonic(), time.time()

    async def one(number: int) -> None:
        tokens = int(outputs[number])
        params = SamplingParams(max_tokens=tokens, ignore_eos=True)
        first = last = time.monotonic()
        num_tokens = 0
        try:
            request = service.validate(prompt_ids * int(prompts[number]), params)
            async for delta in service.stream_request(request, timeout_s=_TIMEOUT_S):
                last = time.monotonic()
                if num_tokens == 0:
                    first = last
                num_tokens += len(delta.token_ids)
        except DaskserveError:
            failed[number] = True
            return
        first_s[number] = first - started_at
        tpot_s = (last - first) / (num_tokens - 1) if num_tokens > 1 else None
        # From the moment at which it was to arrive: a client that is late is no excuse.
        met[number] = slo.is_met(first - started_at - arrival_s[number], tpot_s)

    watch = asyncio.create_task(_record(service, record)) if record is not None else None
    tasks = []
    try:
        for number in range(count):
            await asyncio.sleep(max(0.0, started_at + arrival_s[number] - time.monotonic()))
            tasks.append(asyncio.create_task(one(number)))
        await asyncio.gather(*tasks)
    finally:
        for task in (*tasks, *([watch] if watch is not None else ())):
            task.cancel()
    decisions: list[Any] = service.replanner.journal.decisions if service.replanner else []
    decisions = [one for one in decisions if one.at_unix_s >= began_unix_s]
    return Played(name, arrival_s, met, failed, first_s, decisions, began_unix_s)


async def _record(service: Service, path: Path) -> None:
    """A row a second until cancelled."""
    recorder, window = Recorder(path), Window(_WINDOW_S)
    cursor = 0
    told: dict[int, dict[str, Any]] = {}
    try:
        while True:
            snapshot = await service.observe(cursor)
            cursor = snapshot.cursor
            new = [one for one in snapshot.decisions if told.get(one["decision_id"]) != one]
            told |= {one["decision_id"]: one for one in new}
            recorder.add(Observation(window.sample(snapshot), decisions=tuple(new)))
            await asyncio.sleep(1.0)
    finally:
        recorder.close()

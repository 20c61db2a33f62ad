"""Asks the hosts of a cluster: one worker of each, in bounded time."""

from __future__ import annotations

import asyncio
from typing import Any

from distributed import Client

from daskserve.host.report import HostReport, host_report
from daskserve.models.cache import cache_dir
from daskserve.service.joining import Say, reach_async
from daskserve.service.presence import (
    Presence,
    client_presence,
    presences,
    scheduler_presence,
)

_ASK_TIMEOUT_S = 30.0


def here() -> HostReport:
    """This host."""
    return host_report(cache_dir())


def _record() -> dict[str, Any]:
    return here().to_record()


async def look_around(scheduler: str, say: Say) -> tuple[list[Presence], list[HostReport]]:
    """Everybody on a cluster, client and scheduler first, and the hosts of its workers.

    Raises
    ------
    ClusterError
        There is no scheduler.
    """
    async with await reach_async(scheduler, say) as client:
        addresses = (await client.scheduler.identity(n_workers=-1))["workers"]
        workers = await presences(client, addresses)
        everybody = [client_presence(), await scheduler_presence(client), *workers]
        return everybody, await _hosts(client, workers)


async def _hosts(client: Client, workers: list[Presence]) -> list[HostReport]:
    one_of_each = {worker.host: worker.who for worker in workers if not worker.error}
    if not one_of_each:
        return []
    async with asyncio.timeout(_ASK_TIMEOUT_S):
        asked = list(one_of_each.values())
        answers = await client.run(_record, workers=asked, on_error="return")
    return [HostReport.from_record(a) for a in answers.values() if isinstance(a, dict)]

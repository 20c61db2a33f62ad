"""Before a service is opened on a cluster that exists: is it the right one, and all there?

Every wait says what it waits for, and ends.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import dask
from distributed import Client, SpecCluster

from daskserve.core.instance import EngineConfig
from daskserve.core.placement import Placement
from daskserve.errors import ClusterError
from daskserve.service.agreement import (
    doubtful_versions,
    misplaced_ranks,
    missing_ranks,
    refused_versions,
)
from daskserve.service.presence import (
    Presence,
    client_presence,
    presences,
    scheduler_presence,
)

logger = logging.getLogger(__name__)

Say = Callable[[str], None]
"""Takes a line for whoever waits."""

_POLL_S = 0.5
_SAY_AGAIN_S = 10.0
_FILE_TIMEOUT_S = 30.0
_PATIENCE_S = 1.0  # what is done by then needs no word
_MOST_NAMED = 4


@dataclass(frozen=True, slots=True)
class Expected:
    """What a service counts on.

    Parameters
    ----------
    configs
        Engines of single instances by name, where they differ from that of the service.
    placement
        What an existing cluster must have; None takes what is there.
    say
        Hears what is waited for, and warnings.
    """

    configs: Mapping[str, EngineConfig] = field(default_factory=dict)
    placement: Placement | None = None
    say: Say = logger.info


def scheduler_address(given: str) -> str:
    """A scheduler's address, or the one in a scheduler file (its name ends in .json).

    Raises
    ------
    OSError, ValueError
        There is no such file in time, or no address in it.
    """
    if not given.endswith(".json"):
        return given
    deadline = time.monotonic() + _FILE_TIMEOUT_S
    while True:
        try:
            return json.loads(Path(given).read_text(encoding="utf-8"))["address"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            if time.monotonic() > deadline:
                reason = f"no address in it after {_FILE_TIMEOUT_S:g} s ({error!r})"
                raise ValueError(reason) from error
            time.sleep(_POLL_S)  # the scheduler may be about to write it


class ServiceClient(Client):
    """Closes at once when it cannot connect.

    Left to a garbage collection, it would be closed in whatever thread collects, which may be one
    whose start somebody awaits with the lock that closing needs: both would wait forever.
    """

    def start(self, **kwargs: Any) -> None:
        try:
            super().start(**kwargs)
        except BaseException:
            self.close()
            raise


def reach(scheduler: str | SpecCluster, say: Say) -> Client:
    """A client of a scheduler, given as for `scheduler_address`, or of a cluster (ClusterError)."""
    with _reaching(scheduler, say):
        return ServiceClient(
            scheduler_address(scheduler) if isinstance(scheduler, str) else scheduler
        )


async def reach_async(scheduler: str | SpecCluster, say: Say) -> Client:
    """As `reach`, for use in this event loop."""
    with _reaching(scheduler, say):
        where: str | SpecCluster = scheduler
        if isinstance(scheduler, str):
            where = await asyncio.to_thread(scheduler_address, scheduler)
        client = Client(where, asynchronous=True)
        try:
            return await client
        except BaseException:
            await client.close()
            raise


@contextmanager
def _reaching(scheduler: object, say: Say) -> Iterator[None]:
    """Around a connection to a scheduler: says that it takes long, and clearly that it failed."""
    timeout = dask.config.get("distributed.comm.timeouts.connect")
    text = f"waiting for the Dask scheduler at {scheduler}, up to {timeout}"
    timer = threading.Timer(_PATIENCE_S, say, [text])
    timer.daemon = True
    timer.start()
    try:
        yield
    except (OSError, ValueError) as error:  # ValueError: not an address
        raise ClusterError(f"no Dask scheduler at {scheduler}: {error}") from error
    finally:
        timer.cancel()


async def check_versions(client: Client, say: Say) -> None:
    """Client, scheduler and workers must understand each other.

    Raises
    ------
    ClusterError
        They do not; names every value and who has it.
    """
    addresses = list((await client.scheduler.identity(n_workers=-1))["workers"])
    processes = [client_presence(), await scheduler_presence(client)]
    processes += await presences(client, addresses)
    # Who is on its way out is no reason to stop.
    here = (await client.scheduler.identity(n_workers=-1))["workers"]
    processes = [p for p in processes if p.who in here or p.who in ("client", "scheduler")]
    if reasons := refused_versions(processes):
        raise ClusterError(
            "the cluster cannot work with this daskserve; install the same versions everywhere:"
            + "".join(f"\n- {reason}" for reason in reasons)
        )
    for line in doubtful_versions(processes):
        say(f"warning: {line}")


async def await_placement(
    client: Client, placement: Placement, timeout_s: float, say: Say
) -> list[Presence]:
    """Wait until every rank of the placement is there, on its planned GPU.

    Raises
    ------
    ClusterError
        What runs is not what was placed, or ranks are missing after ``timeout_s``; each is named.
    """
    deadline = time.monotonic() + timeout_s
    known: dict[str, Presence] = {}
    said, said_at = "", 0.0
    while True:
        here = set((await client.scheduler.identity(n_workers=-1))["workers"])
        known = {who: presence for who, presence in known.items() if who in here}
        for presence in await presences(client, sorted(here - known.keys())):
            if not presence.is_silent:  # it is asked again
                known[presence.who] = presence
        workers = list(known.values())
        if problems := misplaced_ranks(placement, workers):
            raise ClusterError(_listed("the cluster is not what the placement says", problems))
        missing = missing_ranks(placement, workers)
        if not missing:
            return workers
        now = time.monotonic()
        if now > deadline:
            text = f"the cluster lacks of the placement, after {timeout_s:g} s"
            raise ClusterError(_listed(text, missing))
        text = f"waiting for {_few(missing)}"
        if text != said or now - said_at > _SAY_AGAIN_S:
            say(f"{text}, up to {deadline - now:.0f} s")
            said, said_at = text, now
        await asyncio.sleep(_POLL_S)


def _listed(text: str, lines: list[str]) -> str:
    return text + ":" + "".join(f"\n- {line}" for line in lines)


def _few(names: list[str]) -> str:
    rest = len(names) - _MOST_NAMED
    return ", ".join(names[:_MOST_NAMED]) + (f" and {rest} more ranks" if rest > 0 else "")

"""Where observations come from: a scheduler, an HTTP server, or a recorded file."""

from __future__ import annotations

import asyncio
import json
import os
import time
import urllib.error
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Protocol

from distributed import Security
from distributed.core import rpc

from daskserve.core.slo import SLO
from daskserve.errors import ClusterError
from daskserve.observe import Observation, Snapshot, Window
from daskserve.observe.observation import RecordingReader
from daskserve.service.names import NOTE_DASHBOARD, OBSERVE

INTERVAL_S = 1.0
KEY_VARIABLE = "DASKSERVE_API_KEY"
_TIMEOUT_S = 5.0
_FOLLOW_S = 0.5


class Source(Protocol):
    """Can be watched."""

    name: str
    """For the head of every page."""
    url: str
    """Where the pages are served, once they are; sources may pass it on."""
    is_live: bool
    """What it tells has just happened."""

    def observations(self) -> AsyncIterator[Observation]:
        """Row after row, as they come (DaskserveError or OSError when it cannot be watched)."""
        ...


class Watched(ABC):
    """What live sources share: a look at the snapshot once a second.

    Parameters
    ----------
    slo
        Instead of the service's own.
    window_s
        Rates and percentiles are of so many seconds.
    """

    is_live = True

    def __init__(self, name: str, slo: SLO | None, window_s: float) -> None:
        self.name = name
        self.url = ""
        self._slo, self._window_s = slo, window_s

    @abstractmethod
    async def look(self, cursor: int, num_decisions: int) -> dict[str, Any]:
        """The record of a snapshot."""

    async def observations(self) -> AsyncIterator[Observation]:
        window = Window(self._window_s, self._slo)
        cursor = num_decisions = 0
        due_at = time.monotonic()
        while True:
            snapshot = Snapshot.from_record(await self.look(cursor, num_decisions))
            cursor, num_decisions = snapshot.cursor, snapshot.num_decisions
            yield Observation(window.sample(snapshot), snapshot.jobs, snapshot.decisions)
            due_at = max(due_at + INTERVAL_S, time.monotonic())
            await asyncio.sleep(due_at - time.monotonic())


class SchedulerSource(Watched):
    """Asks the Dask scheduler that a service runs on.

    Parameters
    ----------
    address
        ``tcp://host:port`` of the scheduler.
    """

    def __init__(self, address: str, slo: SLO | None, window_s: float) -> None:
        super().__init__(address, slo, window_s)
        self._rpc: Any = None
        self._told_url = ""

    async def look(self, cursor: int, num_decisions: int) -> dict[str, Any]:
        if self._rpc is None:
            args = Security().get_connection_args("client")
            self._rpc = rpc(self.name, connection_args=args, timeout=_TIMEOUT_S)
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                if self._told_url != self.url:
                    await getattr(self._rpc, NOTE_DASHBOARD)(url=self.url)
                    self._told_url = self.url
                return await getattr(self._rpc, OBSERVE)(cursor=cursor, num_decisions=num_decisions)
        except BaseException as error:
            connection, self._rpc, self._told_url = self._rpc, None, ""
            await connection.close_rpc()
            if isinstance(error, TimeoutError):  # so Dask treats messages that nobody handles
                raise ClusterError("no answer; is there a service on this scheduler?") from None
            raise


class ServerSource(Watched):
    """Asks ``daskserve serve`` over HTTP; the key, if it wants one, is in DASKSERVE_API_KEY.

    Parameters
    ----------
    url
        ``http://host:port`` of the server.
    """

    def __init__(self, url: str, slo: SLO | None, window_s: float) -> None:
        super().__init__(url.rstrip("/").removesuffix("/v1"), slo, window_s)

    async def look(self, cursor: int, num_decisions: int) -> dict[str, Any]:
        return await asyncio.to_thread(self._get, cursor, num_decisions)

    def _get(self, cursor: int, num_decisions: int) -> dict[str, Any]:
        key = os.environ.get(KEY_VARIABLE)
        request = urllib.request.Request(
            f"{self.name}/snapshot?cursor={cursor}&num_decisions={num_decisions}",
            headers={"Authorization": f"Bearer {key}"} if key else {},
        )
        try:
            with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
                record: dict[str, Any] = json.load(answer)
                return record
        except urllib.error.HTTPError as error:
            hint = f"; set {KEY_VARIABLE}" if error.code == 401 else ""
            raise ClusterError(f"{self.name} answers {error.code} {error.reason}{hint}") from None


class RecordedSource:
    """Reads a recording, all that stands in it at once, and then what is added.

    Parameters
    ----------
    path
        See `daskserve.observe.observation` (ConfigError when it is no recording).
    """

    is_live = False

    def __init__(self, path: Path) -> None:
        self.name, self.url = path.name, ""
        self._path = path
        RecordingReader(path).close()  # a wrong file is refused before anything listens

    async def observations(self) -> AsyncIterator[Observation]:
        reader = RecordingReader(self._path)
        try:
            while True:
                for observation in reader.new():
                    yield observation
                await asyncio.sleep(_FOLLOW_S)
        finally:
            reader.close()


class NoSource:
    """For planning alone: there is no service to watch."""

    name, url = "no service", ""
    is_live = False

    async def observations(self) -> AsyncIterator[Observation]:
        return
        yield

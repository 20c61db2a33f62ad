"""The rows in flight: submitted to the service, not yet written, never more than the window."""

from __future__ import annotations

import queue
import sys
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from distributed import Future
from distributed.client import FutureCancelledError
from distributed.scheduler import KilledWorker

from daskserve.batch.lines import Row
from daskserve.core.instance import Role
from daskserve.core.request import Completion, Request
from daskserve.errors import (
    BatchError,
    ClusterError,
    EngineStepFailed,
    InstanceLost,
    InvalidParameter,
    KilledInstance,
)

if TYPE_CHECKING:
    from daskserve.service import Service

_TICK_S = 0.5
# The service itself moves a request to another instance when one dies, and gives it up after so
# many that the request must be at fault.
_GIVEN_UP = (KilledInstance, InstanceLost, KilledWorker)
# Another try may end otherwise: a broken connection, or an engine step that a neighbour spoiled.
_WORTH_A_RETRY = (FutureCancelledError, OSError, TimeoutError, EngineStepFailed)


def window_size(service: Service, given: int | None, is_noted: bool = True) -> int:
    """Rows in flight: enough that no decode slot waits for the next row to be submitted.

    Fewer on purpose are noted on standard error, unless ``is_noted`` says otherwise.
    """
    slots = sum(i.max_batch_size for i in service.info() if i.role is not Role.PREFILL)
    # At this moment none may be ready: one that died is starting again.
    slots = slots or service.config.max_batch_size
    if given is None:
        return 2 * slots
    if given < 1:
        raise InvalidParameter("max_in_flight", given, "must be at least 1")
    if given < slots and is_noted:
        print(f"note: {given} rows in flight cannot fill {slots} decode slots", file=sys.stderr)
    return given


@dataclass(slots=True)
class _Flight:
    row: Row
    request: Request
    future: Future
    attempt: int


@dataclass(frozen=True, slots=True)
class Finished:
    """A row that will not be tried again: its completion, or the error of its last try."""

    row: Row
    result: Completion | Exception

    @property
    def is_lost(self) -> bool:
        """Its instances died; the row may be the cause, or all of the cluster is going down."""
        return isinstance(self.result, _GIVEN_UP)


class Window:
    """Submits requests and hands back what finishes, with retries.

    Parameters
    ----------
    service
        Runs the requests.
    size
        Most rows in flight.
    max_attempts
        Tries of a row whose connection broke or whose engine step failed.
    stall_timeout_s
        With rows in flight and none finished for so long, the job gives up.
    """

    def __init__(
        self, service: Service, size: int, max_attempts: int, stall_timeout_s: float
    ) -> None:
        self._service, self._size = service, size
        self._max_attempts, self._stall_timeout_s = max_attempts, stall_timeout_s
        self._flights: dict[str, _Flight] = {}
        self._ended: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self._progressed_at = time.monotonic()
        self.num_retries = 0

    def __len__(self) -> int:
        return len(self._flights)

    @property
    def room(self) -> int:
        return self._size - len(self._flights)

    def submit(self, batch: list[tuple[Row, Request]], attempt: int = 1) -> None:
        """Send requests in one graph."""
        try:
            futures = self._service.submit_requests([request for _, request in batch])
        except ClusterError as error:
            raise _resumable(error) from None
        for (row, request), future in zip(batch, futures, strict=True):
            self._flights[request.request_id] = _Flight(row, request, future, attempt)
            self._service.client.loop.add_callback(self._await, request.request_id, future)

    async def _await(self, request_id: str, future: Future) -> None:
        """On the client's loop: each result is gathered by itself, none waits for another."""
        try:
            result = await future
        except Exception as error:
            # Dask keeps the exception with the future: its traceback would keep this frame, and
            # so the future, for ever.
            result = error.with_traceback(None)
        self._ended.put((request_id, result))

    def wait(self) -> list[Finished]:
        """What has finished; waits a moment for the first one and may come back with none.

        Raises
        ------
        BatchError
            Scheduler or instances are gone, or nothing finished for ``stall_timeout_s``.
        """
        ended = self._take()
        # First of all: a lost scheduler ends every row at once, and none of them is at fault.
        if self._service.client.status != "running":
            raise BatchError(
                "the Dask scheduler is gone; start it again and run the same command to go on"
            )
        now = time.monotonic()
        if ended or not self._flights:
            self._progressed_at = now
        elif now - self._progressed_at > self._stall_timeout_s:
            raise BatchError(
                f"no row finished for {self._stall_timeout_s:g} s (setting "
                f"batch.stall-timeout-s) with {len(self)} in flight; run the same command "
                "again to go on"
            )
        finished = [self._settle(request_id, result) for request_id, result in ended]
        return [f for f in finished if f is not None]

    def _take(self) -> list[tuple[str, Any]]:
        taken = []
        try:
            taken.append(self._ended.get(timeout=_TICK_S))
            while True:
                taken.append(self._ended.get_nowait())
        except queue.Empty:
            return taken

    def _settle(self, request_id: str, result: Any) -> Finished | None:
        """None for a row that is tried again."""
        if isinstance(result, ClusterError):
            raise _resumable(result)
        flight = self._flights.pop(request_id)
        if isinstance(result, _WORTH_A_RETRY) and flight.attempt < self._max_attempts:
            self.num_retries += 1
            # A new id, so that nothing of the lost try is taken for this one.
            again = replace(
                flight.request,
                request_id=f"{flight.request.request_id}-{flight.attempt}",
                submitted_at=time.monotonic(),
            )
            self.submit([(flight.row, again)], flight.attempt + 1)
            return None
        return Finished(flight.row, result)

    def close(self) -> None:
        """Cancel what is still in flight."""
        flights, self._flights = self._flights, {}
        if flights and self._service.client.status == "running":
            self._service.client.cancel([f.future for f in flights.values()])


def _resumable(error: ClusterError) -> BatchError:
    return BatchError(f"{error}; run the same command again to go on")

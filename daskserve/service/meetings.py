"""Where the ranks of an instance find each other: the scheduler keeps the head's address."""

from __future__ import annotations

from typing import NamedTuple


class _Open(NamedTuple):
    worker: str
    host: str
    port: int


class Meetings:
    """By instance, where its head waits for the other ranks. Handlers of the scheduler."""

    def __init__(self) -> None:
        self._open: dict[str, _Open] = {}

    async def open(self, instance: str, worker: str, host: str, port: int) -> None:
        """A head waits; it replaces an earlier one of the same instance."""
        self._open[instance] = _Open(worker, host, port)

    async def find(self, instance: str) -> tuple[str, int] | None:
        """Host and port of the head; None while there is none."""
        found = self._open.get(instance)
        return None if found is None else (found.host, found.port)

    def forget(self, worker: str) -> None:
        """The head's worker has left."""
        self._open = {name: held for name, held in self._open.items() if held.worker != worker}

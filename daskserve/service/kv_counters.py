"""How much KV a worker has pulled, and from whom: tells whether KV crosses from host to host."""

from __future__ import annotations

from dataclasses import dataclass

from distributed.comm import get_address_host


@dataclass(slots=True)
class Pulled:
    """KV that came from one holder: bytes, and pulls that brought them."""

    num_bytes: int = 0
    num_pulls: int = 0


class KVCounters:
    """Counts the pulls of one worker that ended well, by the Dask address of the holder."""

    def __init__(self) -> None:
        self._of: dict[str, Pulled] = {}

    def add(self, holder: str, num_bytes: int) -> None:
        """A pull from ``holder`` has brought so many bytes."""
        pulled = self._of.setdefault(holder, Pulled())
        pulled.num_bytes += num_bytes
        pulled.num_pulls += 1

    async def report(self) -> dict[str, tuple[int, int]]:
        """Bytes and pulls by holder. Handler of the worker."""
        return {holder: (p.num_bytes, p.num_pulls) for holder, p in self._of.items()}


def is_same_host(first: str, second: str) -> bool:
    """Whether two Dask addresses are of one host."""
    return get_address_host(first) == get_address_host(second)

"""The burst buffer of a PREFILL instance: finished KV that waits to be pulled (DistServe 4.3).

Every entry has its own deadline, looked at on its own: a transfer that keeps renewing its pin
never hides an abandoned one behind it.
"""

from __future__ import annotations

import hmac
import secrets
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from daskserve.core.kv import KVHandle
from daskserve.core.shards import Shard
from daskserve.errors import KVUnavailable
from daskserve.workers.kv_digest import summed

_SECRET_BYTES = 16


@dataclass(slots=True)
class _Held:
    handle: KVHandle
    owner: int
    pages: tuple[int, ...]
    digests: np.ndarray
    expires_at: float


class BurstBuffer:
    """Held KV by request. Times are seconds of one monotonic clock; any thread may call.

    Parameters
    ----------
    kv_layout
        Fingerprint that a puller must share.
    lease_s
        How long KV waits for its pull.
    pull_timeout_s
        How long a pull may take: pages stay pinned that long after each `pin`.
    home
        What handles say of the ranks of this instance: ``tp``, ``pp``, ``ranks``,
        ``stage_layers``.
    """

    def __init__(
        self, kv_layout: str, lease_s: float, pull_timeout_s: float, home: Mapping[str, Any]
    ) -> None:
        self.kv_layout = kv_layout
        self._home = home
        self._lease_s = lease_s
        self._pull_timeout_s = pull_timeout_s
        self._held: dict[str, _Held] = {}
        self._lock = threading.Lock()

    @property
    def followers(self) -> tuple[str, ...]:
        """Dask addresses of this instance's ranks but the head."""
        return self._home.get("ranks", ())[1:]

    def __len__(self) -> int:
        return len(self._held)

    def hold(
        self,
        request_id: str,
        address: str,
        num_tokens: int,
        owner: int,
        pages: list[int],
        digests: np.ndarray,
        now: float,
    ) -> KVHandle:
        """Keep the pages of ``owner`` until release or expiry; the handle names them.

        ``digests`` are those of every layer and KV head of the model, on whatever rank it is.
        """
        handle = KVHandle(
            request_id=request_id,
            instance_address=address,
            secret=secrets.token_bytes(_SECRET_BYTES),
            num_tokens=num_tokens,
            kv_layout=self.kv_layout,
            digest=summed(digests),
            **self._home,
        )
        held = _Held(handle, owner, tuple(pages), digests, now + self._lease_s)
        with self._lock:
            self._held[request_id] = held
        return handle

    def pin(self, handle: KVHandle, now: float) -> tuple[int, ...]:
        """The pages to send, kept for the length of a pull.

        Raises
        ------
        KVUnavailable
            Unknown or expired request, wrong secret, or another layout.
        """
        return self._pin(handle, now).pages

    def pin_piece(self, handle: KVHandle, shard: Shard, now: float) -> tuple[tuple[int, ...], int]:
        """As `pin`, for a part of the layers and heads: the pages, and the part's digest."""
        held = self._pin(handle, now)
        num_layers, num_heads = held.digests.shape
        if shard.layers.stop > num_layers or shard.heads.stop > num_heads:
            raise KVUnavailable(
                f"layers {shard.layers} and heads {shard.heads} are asked of {num_layers} layers"
                f" and {num_heads} heads"
            )
        layers, heads = shard.within(Shard(0, num_layers, 0, num_heads))
        return held.pages, summed(held.digests[layers, heads])

    def _pin(self, handle: KVHandle, now: float) -> _Held:
        with self._lock:
            held = self._held.get(handle.request_id)
            if held is None or held.expires_at <= now:
                raise KVUnavailable(
                    f"no KV is held for {handle.request_id}: released, expired or never computed"
                )
            if not _same_secret(held.handle.secret, handle.secret):
                raise KVUnavailable(f"the handle of {handle.request_id} shows a wrong secret")
            if handle != held.handle:
                raise KVUnavailable(
                    f"the handle of {handle.request_id} does not match what is held:"
                    f" {handle.num_tokens} tokens of layout {handle.kv_layout},"
                    f" held {held.handle.num_tokens} of {held.handle.kv_layout}"
                )
            held.expires_at = max(held.expires_at, now + self._pull_timeout_s)
            return held

    def keep(self, request_ids: Iterable[str], now: float) -> None:
        """Start the leases of these requests anew; unknown ones are ignored."""
        with self._lock:
            for request_id in request_ids:
                held = self._held.get(request_id)
                if held is not None and held.expires_at > now:
                    held.expires_at = max(held.expires_at, now + self._lease_s)

    def take(self, request_id: str, secret: bytes | None = None) -> int | None:
        """Stop holding; returns the owner whose pages to free, or None if nothing matches.

        ``secret`` None is the instance's own abort.
        """
        with self._lock:
            held = self._held.get(request_id)
            if held is None:
                return None
            if secret is not None and not _same_secret(held.handle.secret, secret):
                return None
            del self._held[request_id]
            return held.owner

    def expire(self, now: float) -> list[int]:
        """Stop holding what is over its deadline; returns the owners whose pages to free."""
        with self._lock:
            expired = [key for key, held in self._held.items() if held.expires_at <= now]
            return [self._held.pop(key).owner for key in expired]

    def next_expiry_at(self) -> float | None:
        """When the next entry will expire; None when nothing is held."""
        with self._lock:
            return min((held.expires_at for held in self._held.values()), default=None)


def _same_secret(held: bytes, shown: object) -> bool:
    """In constant time; what is shown comes from another process and may be anything."""
    return isinstance(shown, bytes) and hmac.compare_digest(held, shown)

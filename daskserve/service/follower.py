"""A worker that is a rank of an instance, but not its head.

It carries no role: the head gets the requests and drives it through torch.distributed. It finds
the head through the scheduler; when the group breaks, its process is replaced like the head's, and
the ranks come together anew.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from typing import TYPE_CHECKING, Any

from distributed import Worker
from distributed.comm import get_address_host
from distributed.core import Status

from daskserve.config import RankSettings, ServiceSettings
from daskserve.core.instance import EngineConfig
from daskserve.core.kv import KVHandle
from daskserve.core.shards import Shard
from daskserve.errors import InstanceLost, KVUnavailable
from daskserve.service.head import shape_of
from daskserve.service.kv_counters import KVCounters
from daskserve.service.kv_parts import Limits, ask_to_pin, export_part, pull_parts, shown_handle
from daskserve.service.kv_pull import OPERATION, KVServer, Views
from daskserve.service.leaving import Leaving
from daskserve.service.names import FIND_GROUP, KV_PULLED, PULL_KV

if TYPE_CHECKING:
    from daskserve.workers.parallel.follower import Follower

logger = logging.getLogger(__name__)

_POLL_S = 0.1
_JOIN_S = 5.0  # to reach a head that waits
_CLOSE_GRACE_S = 5.0


class FollowerRank:
    """Runs one follower on the worker.

    Parameters
    ----------
    worker
        Whose process it is.
    place
        Which rank of which instance.
    config, settings
        As for the head.
    leaving
        Whether the worker is on its way out.
    """

    def __init__(
        self,
        worker: Worker,
        place: RankSettings,
        config: EngineConfig,
        settings: ServiceSettings,
        leaving: Leaving,
    ) -> None:
        self._worker = worker
        self._place = place
        self._config = config
        self._settings = settings
        self._leaving = leaving
        self._parallelism = shape_of(place)
        self._address = worker.contact_address or worker.address
        self._follower: Follower | None = None
        self._head = ""
        self._is_over = False
        self._counters = KVCounters()
        self._limits = Limits(
            settings.pull_connect_timeout_s, settings.pull_stall_timeout_s, config.kv_pull_timeout_s
        )

    def start(self) -> None:
        stall_s = self._settings.pull_stall_timeout_s
        server = KVServer(
            self._address, _no_whole, lambda *released: None, stall_s, self._export_part
        )
        self._worker.handlers[OPERATION] = server.handle
        self._worker.handlers[PULL_KV] = self._pull
        self._worker.handlers[KV_PULLED] = self._counters.report
        self._running = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Leave; the head is given some time to end the group first."""
        self._is_over = True
        for name in (OPERATION, PULL_KV, KV_PULLED):
            self._worker.handlers.pop(name, None)
        await asyncio.wait([self._running], timeout=_CLOSE_GRACE_S)
        self._running.cancel()
        if self._follower is not None:
            self._follower.stage.group.close()
            self._follower = None

    async def _run(self) -> None:
        while not self._is_over:
            found = await self._find()
            if found is not None and await _on_thread(self._serve, *found):
                return
            await asyncio.sleep(_POLL_S)

    async def _find(self) -> tuple[str, int] | None:
        try:
            find = getattr(self._worker.scheduler, FIND_GROUP)
            return await find(instance=self._place.instance)
        except Exception as error:  # the service may be on its way in or out over there
            logger.debug("the scheduler does not say where the head is: %r", error)
            return None

    def _serve(self, host: str, port: int) -> bool:
        """Be a rank of the group there until it ends; False if it was no group for us."""
        from daskserve.workers.parallel.follower import Follower
        from daskserve.workers.parallel.group import Meeting, join_group
        from daskserve.workers.parallel.start import ADDRESS, start_rank

        name = f"rank {self._place.number} of {self._place.instance}"
        try:
            store = join_group(Meeting(host, port), self._place.number, _JOIN_S)
        except InstanceLost as error:
            logger.debug("%s waits: %s", name, error)
            return False
        try:
            stage = start_rank(
                self._config,
                self._parallelism,
                self._place.number,
                store,
                host=get_address_host(self._worker.address),
                address=self._address,
                load_timeout_s=self._settings.start_timeout_s,
            )
            self._head = stage.group.shared(ADDRESS)[0]
            self._follower = Follower(stage)
            self._follower.serve()
        except Exception as error:
            logger.error("%s on %s ends: %s", name, self._address, error)
        is_staying = not self._is_over and not self._leaving.has_begun
        if is_staying and self._worker.status is Status.running:
            self._worker.loop.add_callback(
                self._worker.close, nanny=False, executor_wait=False, reason="daskserve-rank-ended"
            )
        return True

    # Handlers.

    async def _export_part(self, handle: KVHandle, shard: Shard) -> tuple[Views, int]:
        follower = self._serving()
        pages, digest = await ask_to_pin(self._worker.rpc, self._head, handle, shard, self._limits)
        return export_part(follower.pool, pages, shard), digest

    async def _pull(self, handle: dict[str, Any], owner: int, num_pages: int) -> dict[str, Any]:
        try:
            follower = self._serving()
            async with asyncio.timeout(self._limits.total_s):
                pieces, digest = await pull_parts(
                    self._worker.rpc,
                    shown_handle(handle),
                    follower.pool,
                    follower.stage.shape,
                    num_pages,
                    self._limits,
                    counters=self._counters,
                )
        except (KVUnavailable, TimeoutError) as error:
            return {"refused": str(error) or "it takes too long"}
        follower.keep(owner, pieces)
        # The head settles it at once; if it gave up before we were done, nobody does.
        asyncio.get_running_loop().call_later(2 * self._limits.total_s, follower.forget, owner)
        return {"digest": digest}

    def _serving(self) -> Follower:
        if self._follower is None or self._follower.pool is None:
            raise KVUnavailable(f"{self._address} is no rank of an instance now")
        return self._follower


def _no_whole(handle: KVHandle) -> list[memoryview]:
    raise KVUnavailable("a rank has some layers and heads only")


async def _on_thread(function: Any, *args: Any) -> Any:
    """Run on a thread that does not hold up the end of the process, however long it takes."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Any] = loop.create_future()

    def settle(result: Any, error: BaseException | None) -> None:
        if not done.done():
            done.set_result(result) if error is None else done.set_exception(error)

    def main() -> None:
        result, error = None, None
        try:
            result = function(*args)
        except BaseException as raised:
            error = raised
        try:
            loop.call_soon_threadsafe(settle, result, error)
        except RuntimeError:
            logger.debug("the worker is gone")

    threading.Thread(target=main, name="daskserve rank", daemon=True).start()
    return await done

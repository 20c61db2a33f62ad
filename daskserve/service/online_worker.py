"""The worker's side of online requests: runs what services ask for, without Dask tasks."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from distributed.comm import Comm
from distributed.core import Status

from daskserve.core.instance import Role
from daskserve.core.request import Prefilled
from daskserve.errors import DaskserveError, InstanceLost
from daskserve.service.link import Link, Message
from daskserve.service.online_wire import (
    ABORT,
    COMPLETED,
    FAILED,
    PREFILLED,
    RUN,
    pack_completion,
    pack_error,
    pack_prefilled,
    unpack_emitted,
    unpack_prefilled,
    unpack_request,
)

if TYPE_CHECKING:
    from daskserve.service.instance_plugin import InstancePlugin

logger = logging.getLogger(__name__)


class OnlineServer:
    """Takes the links of services.

    Parameters
    ----------
    plugin
        Has the instance.
    silence_s
        See `Link`.
    """

    def __init__(self, plugin: InstancePlugin, silence_s: float) -> None:
        self._plugin = plugin
        self._silence_s = silence_s
        self._links: set[Link] = set()

    async def serve(self, comm: Comm) -> Status:
        """Handler of the worker: the link of one service; what it runs ends with it."""
        link = Link(self._silence_s)
        session = _Session(self._plugin, link)
        self._links.add(link)
        try:
            await link.talk(comm, session.on_message)
        finally:
            self._links.discard(link)
            session.end()
        return Status.dont_reply

    def close(self) -> None:
        for link in self._links:
            link.cut()


class _Session:
    """What one service runs here. Its finished prefills are freed by the scheduler."""

    def __init__(self, plugin: InstancePlugin, link: Link) -> None:
        self._plugin = plugin
        self._link = link
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def on_message(self, message: Message) -> None:
        run_id = message["run_id"]
        if message["op"] == RUN:
            self._tasks[run_id] = asyncio.create_task(self._run(run_id, message))
        elif message["op"] == ABORT:
            self._plugin.abort(run_id)
            if run_id in self._tasks:
                self._tasks[run_id].cancel()

    def end(self) -> None:
        for task in self._tasks.values():
            task.cancel()

    async def _run(self, run_id: str, message: Message) -> None:
        try:
            answer = await self._answer(message)
        except DaskserveError as error:
            if isinstance(error, InstanceLost):
                self._plugin.lose(error)
            answer = {"op": FAILED, "error": pack_error(error)}
        except Exception as error:
            logger.exception("an online request failed on its instance")
            text = f"{type(error).__name__}: {error}"
            answer = {"op": FAILED, "error": pack_error(DaskserveError(text))}
        finally:
            if self._tasks.get(run_id) is asyncio.current_task():
                del self._tasks[run_id]
        self._link.send({**answer, "run_id": run_id})

    async def _answer(self, message: Message) -> Message:
        plugin = self._plugin
        instance = await plugin.instance()
        request = unpack_request(message["request"])
        role = Role(message["role"])
        on_token = plugin.on_token(request.token_sink)
        emitted = unpack_emitted(message["emitted"])
        outcome: Any
        if role is Role.PREFILL:
            outcome = await instance.prefill(request, plugin.address, on_token)
        elif role is Role.DECODE:
            prefilled = unpack_prefilled(message["prefilled"])
            outcome = await instance.decode(request, prefilled, plugin.pull, on_token, emitted)
        else:
            outcome = await instance.generate(request, on_token, emitted)
        if isinstance(outcome, Prefilled):
            return {"op": PREFILLED, "prefilled": pack_prefilled(outcome)}
        return {"op": COMPLETED, "completion": pack_completion(outcome)}

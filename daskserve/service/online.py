"""The service's side of online requests: its links, and the streams that are open on them."""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

from distributed import Client

from daskserve.config import ServiceSettings
from daskserve.core.request import Request
from daskserve.errors import ClusterError, DaskserveError, RequestCancelled
from daskserve.service.link import Link, Message
from daskserve.service.names import ONLINE, request_of_run
from daskserve.service.online_call import OnlineCall
from daskserve.service.token_stream import TokenListener, TokenStream

logger = logging.getLogger(__name__)


class OnlineRequests:
    """Sends requests to instances directly, where the scheduler has bound them.

    Parameters
    ----------
    client
        Of the scheduler; all that waits runs on its event loop.
    listener
        Takes the tokens.
    settings
        Time limits.
    is_colocated
        Whether requests run on colocated instances.
    """

    def __init__(
        self,
        client: Client,
        listener: TokenListener,
        settings: ServiceSettings,
        is_colocated: bool,
    ) -> None:
        self.listener = listener
        self.is_colocated = is_colocated
        self._client = client
        self._settings = settings
        self._loop: asyncio.AbstractEventLoop = client.loop.asyncio_loop
        self._scheduler: Link | None = None
        self._instances: dict[str, Link] = {}
        self._calls: dict[str, OnlineCall] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def start(
        self, request: Request, timeout_s: float | None, max_queue: int | None
    ) -> TokenStream:
        """The tokens of a request to come. Any thread."""
        request_id = request.request_id
        stream = TokenStream(partial(self._soon, self._abandon, request_id))
        # Strongly until it is open, or it could be dropped before there is what to abandon.
        self._soon(self._open, request, stream, timeout_s, max_queue)
        return stream

    async def close(self) -> None:
        """Cancel what is open and cut the links."""
        for call in list(self._calls.values()):
            call.fail(RequestCancelled("the service was closed"))
        for link in (self._scheduler, *self._instances.values()):
            if link is not None:
                link.cut()
        if self._tasks:
            await asyncio.wait(self._tasks)

    # For the calls, on the event loop.

    def to_scheduler(self) -> Link:
        if self._scheduler is None or self._scheduler.is_over:
            self._scheduler = Link(self._settings.link_silence_s)
            address = self._client.scheduler.address
            self._dial(self._scheduler, address, self._settings.link_silence_s)
        return self._scheduler

    def to_instance(self, address: str) -> Link:
        link = self._instances.get(address)
        if link is None:
            link = self._instances[address] = Link(self._settings.link_silence_s)
            self._dial(link, address, self._settings.pull_connect_timeout_s)
        return link

    def closed(self, request_id: str) -> None:
        self._calls.pop(request_id, None)

    # Of the links.

    def _dial(self, link: Link, address: str, timeout_s: float) -> None:
        is_scheduler = link is self._scheduler
        on_message = self._on_scheduler if is_scheduler else self._on_instance
        task = asyncio.create_task(
            link.dial(address, ONLINE, on_message, timeout_s, self._client.connection_args)
        )
        self._tasks.add(task)
        task.add_done_callback(partial(self._ended, link, address))

    def _ended(self, link: Link, address: str, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            logger.error("the link to %s failed", address, exc_info=task.exception())
        if self._instances.get(address) is link:
            del self._instances[address]
        for call in list(self._calls.values()):
            call.on_end_of(link)

    def _on_scheduler(self, message: Message) -> None:
        self._guarded(message["request_id"], OnlineCall.on_scheduler, message)

    def _on_instance(self, message: Message) -> None:
        self._guarded(request_of_run(message["run_id"]), OnlineCall.on_instance, message)

    def _guarded(
        self, request_id: str, react: Callable[[OnlineCall, Message], None], message: Message
    ) -> None:
        """A message that cannot be understood fails its request, not its neighbours."""
        call = self._calls.get(request_id)
        if call is None:
            return
        try:
            react(call, message)
        except Exception as error:
            logger.exception("an online request failed in its service")
            call.fail(DaskserveError(f"{type(error).__name__}: {error}"))

    # Of the streams.

    def _soon(self, function: Callable[..., None], *args: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError:
            pass  # the loop is closed, and everything with it

    def _open(
        self,
        request: Request,
        stream: TokenStream,
        timeout_s: float | None,
        max_queue: int | None,
    ) -> None:
        if self._client.status != "running":
            stream.fail(ClusterError("the service is closed, or its scheduler is gone"))
            return
        call = OnlineCall(request, weakref.ref(stream), self)
        self._calls[request.request_id] = call
        call.open(timeout_s, max_queue)

    def _abandon(self, request_id: str) -> None:
        call = self._calls.get(request_id)
        if call is not None:
            call.abandon()

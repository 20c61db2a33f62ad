"""One instance: an engine on its own thread with an asyncio face.

Coroutines put commands into the engine's inbox and await futures; after every step the engine
hands all that happened to the event loop in one call, so a token costs no loop round trip.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

from daskserve.core.instance import EngineConfig, InstanceInfo, InstanceLoad, Role
from daskserve.core.kv import KVHandle
from daskserve.core.request import Completion, Prefilled, Request, TokenDelta
from daskserve.errors import (
    DaskserveError,
    EngineStepFailed,
    InstanceLost,
    KVUnavailable,
)
from daskserve.workers.engine import Engine, Event, Reserved
from daskserve.workers.kv_digest import kv_digest
from daskserve.workers.loading import LoadModel, build_engine, load_model
from daskserve.workers.sequence import Sequence

logger = logging.getLogger(__name__)

Pull = Callable[[KVHandle, list[memoryview]], Awaitable[None]]
"""Fills the destination pages, or raises ``KVUnavailable``. Once it has returned, raised or been
cancelled, nothing may write to the views any more: the pages may belong to someone else."""

OnToken = Callable[[TokenDelta], None]
"""Called on the event loop for every new token."""

_CLOSE_TIMEOUT_S = 30.0
_INLINE_DIGEST_BYTES = 2**20  # below this a digest is quicker than a hop to another thread


@dataclass(slots=True, eq=False)
class _Waiter:
    result: asyncio.Future[Any]
    on_token: OnToken | None = None
    pull: Pull | None = None
    pull_task: asyncio.Task[None] | None = None


class Instance:
    """A prefill, decode or colocated instance.

    Parameters
    ----------
    role
        What it does; the methods for other roles raise.
    config
        The engine's settings.
    load
        Gives the runner and the tokenizer.
    """

    def __init__(self, role: Role, config: EngineConfig, load: LoadModel = load_model) -> None:
        self.role = role
        self.config = config
        self._load_model = load
        self._inbox: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._engine: Engine | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._lost: InstanceLost | None = None
        self._waiters: set[_Waiter] = set()

    def start(self) -> None:
        """Load the model on the engine's thread; blocks until it is ready (ModelError)."""
        ready: Future[Engine] = Future()
        self._thread = threading.Thread(
            target=self._main, args=(ready,), name=f"engine-{self.role.value.lower()}", daemon=True
        )
        self._thread.start()
        self._engine = ready.result()

    @property
    def engine(self) -> Engine:
        if self._engine is None:
            raise RuntimeError("the instance is not started")
        return self._engine

    @property
    def info(self) -> InstanceInfo:
        engine = self.engine
        return InstanceInfo(
            role=self.role,
            model=self.config.model,
            dtype=self.config.dtype,
            context_tokens=engine.runner.shape.context_tokens,
            block_size=engine.pool.block_size,
            num_kv_blocks=engine.pool.num_blocks,
            max_batch_size=self.config.max_batch_size,
            kv_layout=engine.kv_layout,
        )

    def load(self) -> InstanceLoad:
        """Counters as of the last step or command."""
        return self.engine.load

    @property
    def clock_offset_s(self) -> float:
        """Add to ``time.monotonic()`` to get the service's clock."""
        return self.engine.clock_offset_s

    @clock_offset_s.setter
    def clock_offset_s(self, offset_s: float) -> None:
        self.engine.clock_offset_s = offset_s

    async def prefill(
        self, request: Request, address: str, on_token: OnToken | None = None
    ) -> Prefilled:
        """PREFILL: compute the prompt and its first token; hold the KV until it is released.

        ``address`` goes into the handle as the place to pull from.
        """
        self._require(Role.PREFILL)
        sequence = Sequence(request, streams=on_token is not None, address=address)
        return await self._run(sequence, on_token)

    async def decode(
        self,
        request: Request,
        prefilled: Prefilled,
        pull: Pull,
        on_token: OnToken | None = None,
    ) -> Completion:
        """DECODE: wait for room, pull the KV, decode to the end.

        A KV that cannot be pulled in time, or is not what the handle says, is computed again
        here. Tokens after the first are given to ``on_token``.
        """
        self._require(Role.DECODE)
        if prefilled.completion is not None:
            return prefilled.completion
        sequence = Sequence(
            request,
            streams=on_token is not None,
            handle=prefilled.handle,
            output_ids=[prefilled.first_token_id],
            first_token_at=prefilled.first_token_at,
            prefill_queue_s=prefilled.prefill_queue_s,
            prefill_s=prefilled.prefill_s,
        )
        return await self._run(sequence, on_token, pull)

    async def generate(self, request: Request, on_token: OnToken | None = None) -> Completion:
        """COLOCATED: prefill and decode here."""
        self._require(Role.COLOCATED)
        return await self._run(Sequence(request, streams=on_token is not None), on_token)

    def abort(self, request_id: str) -> None:
        """Cancel a request in any state; its caller gets ``RequestCancelled``. Any thread."""
        self._inbox.put(partial(self.engine.abort, request_id))

    def export(self, handle: KVHandle) -> list[memoryview]:
        """Bytes of the held KV, pinned for ``kv_pull_timeout_s`` or until released. Any thread.

        Raises
        ------
        KVUnavailable
            Unknown, expired or released request, wrong secret, or another layout.
        """
        self._require(Role.PREFILL)
        pages = self.engine.holding.pin(handle, self.engine.clock())
        return self.engine.pool.page_views(pages)

    def release(self, request_id: str, secret: bytes) -> None:
        """Give held KV back; does nothing if it is gone or the secret is wrong. Any thread."""
        self._inbox.put(partial(self.engine.release, request_id, secret))

    async def close(self, drain_s: float = 0.0) -> None:
        """Stop; requests that are not done after ``drain_s`` seconds get ``InstanceLost``."""
        if self._thread is None:
            return
        self._lost = self._lost or InstanceLost(f"the {self.role.value} instance is closing")
        deadline = time.monotonic() + drain_s
        while self.engine.num_sequences and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        self._inbox.put(None)
        await asyncio.to_thread(self._thread.join, _CLOSE_TIMEOUT_S)

    def _require(self, role: Role) -> None:
        if self.role is not role:
            raise ValueError(f"this is a {self.role.value} instance, not {role.value}")

    async def _run(
        self, sequence: Sequence, on_token: OnToken | None, pull: Pull | None = None
    ) -> Any:
        if self._lost is not None:
            raise self._lost
        self._loop = asyncio.get_running_loop()
        waiter = sequence.waiter = _Waiter(self._loop.create_future(), on_token, pull)
        self._waiters.add(waiter)
        self._inbox.put(partial(self.engine.add, sequence))
        try:
            return await waiter.result
        except asyncio.CancelledError:
            self._inbox.put(partial(self.engine.abort_sequence, sequence))
            raise
        finally:
            self._waiters.discard(waiter)

    # The engine's thread.

    def _main(self, ready: Future[Engine]) -> None:
        try:
            engine = build_engine(self.role, self.config, self._load_model)
        except BaseException as error:
            ready.set_exception(error)
            return
        ready.set_result(engine)
        reason = "closed"
        try:
            self._serve(engine)
        except BaseException:
            logger.exception("the %s engine died", self.role.value)
            reason = "lost to an error"
        self._lost = InstanceLost(f"the {self.role.value} instance was {reason}")
        self._deliver(engine)
        self._call_loop(self._fail_waiting, self._lost)

    def _serve(self, engine: Engine) -> None:
        is_busy = False
        while True:
            for command in self._commands(engine, is_busy):
                if command is None:
                    return
                self._guarded(engine, command)
            is_busy = bool(self._guarded(engine, engine.step))
            self._deliver(engine)

    def _commands(self, engine: Engine, is_busy: bool) -> list[Callable[[], object] | None]:
        """All that has come in; waits for the first one, or the next expiry, when idle."""
        commands: list[Callable[[], object] | None] = []
        expires_at = engine.holding.next_expiry_at()
        wait_s = None if expires_at is None else max(expires_at - engine.clock(), 0.0)
        try:
            if not is_busy:
                commands.append(self._inbox.get(timeout=wait_s))
            while True:
                commands.append(self._inbox.get_nowait())
        except queue.Empty:
            return commands

    def _guarded(self, engine: Engine, action: Callable[[], object]) -> object:
        """A bug in the bookkeeping fails what is under way, not the instance."""
        try:
            return action()
        except Exception as error:
            logger.exception("the %s engine failed between steps", self.role.value)
            engine.abort_all(
                EngineStepFailed(f"the engine failed: {type(error).__name__}: {error}")
            )
            return False

    def _deliver(self, engine: Engine) -> None:
        if engine.events:
            events, engine.events = engine.events, []
            self._call_loop(self._dispatch, events)

    def _call_loop(self, function: Callable[..., None], *args: Any) -> None:
        if self._loop is None:
            return
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError:
            logger.warning("the event loop is closed: %s dropped", function.__name__)

    # The event loop.

    def _dispatch(self, events: list[Event]) -> None:
        for sequence, payload in events:
            waiter: _Waiter = sequence.waiter
            if isinstance(payload, TokenDelta):
                self._call_on_token(waiter, payload)
            elif isinstance(payload, Reserved):
                self._start_pull(sequence, payload)
            else:
                self._settle(waiter, payload)

    def _call_on_token(self, waiter: _Waiter, delta: TokenDelta) -> None:
        try:
            waiter.on_token(delta)
        except Exception:
            logger.exception("on_token of request %s raised", delta.request_id)

    def _settle(self, waiter: _Waiter, payload: Completion | Prefilled | DaskserveError) -> None:
        if waiter.pull_task is not None:
            waiter.pull_task.cancel()
        if waiter.result.done():
            # The caller left at the moment its prefill was done: nobody else would release it.
            if isinstance(payload, Prefilled) and payload.handle is not None:
                self.release(payload.request_id, payload.handle.secret)
        elif isinstance(payload, DaskserveError):
            waiter.result.set_exception(payload)
        else:
            waiter.result.set_result(payload)

    def _fail_waiting(self, error: InstanceLost) -> None:
        for waiter in list(self._waiters):
            self._settle(waiter, error)

    def _start_pull(self, sequence: Sequence, reserved: Reserved) -> None:
        waiter: _Waiter = sequence.waiter
        started_at = time.monotonic()
        waiter.pull_task = asyncio.create_task(self._pull(sequence.handle, waiter.pull, reserved))

        def ended(task: asyncio.Task[None]) -> None:
            error = None if task.cancelled() else task.exception()
            if error is not None:
                request_id = sequence.request.request_id
                logger.warning("pulling the KV of %s failed, computing it: %r", request_id, error)
            succeeded = error is None and not task.cancelled()
            transfer_s = time.monotonic() - started_at
            self._inbox.put(partial(self.engine.pull_ended, reserved.owner, succeeded, transfer_s))

        waiter.pull_task.add_done_callback(ended)

    async def _pull(self, handle: KVHandle, pull: Pull, reserved: Reserved) -> None:
        views = self.engine.pool.page_views(reserved.pages)
        async with asyncio.timeout(self.config.kv_pull_timeout_s):
            await pull(handle, views)
        check = partial(kv_digest, self.engine.pool.words, reserved.pages)
        is_small = sum(view.nbytes for view in views) < _INLINE_DIGEST_BYTES
        digest = check() if is_small else await asyncio.to_thread(check)
        if digest != handle.digest:
            raise KVUnavailable(f"the pulled KV of {handle.request_id} is not what was computed")

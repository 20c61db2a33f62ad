"""One instance: an engine on its own thread with an asyncio face.

Coroutines put commands into the engine's inbox and await futures; after every step the engine
hands all that happened to the event loop in one call, so a token costs no loop round trip.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from daskserve.core.instance import EngineConfig, InstanceInfo, InstanceLoad, Role
from daskserve.core.kv import KVHandle, KVStream
from daskserve.core.request import Completion, Prefilled, Request, TokenDelta
from daskserve.core.shards import Shard
from daskserve.errors import DaskserveError, InstanceLost
from daskserve.models.catalog import resolve
from daskserve.models.identity import fingerprint
from daskserve.workers.engine import Engine, Event, Reserved
from daskserve.workers.engine_thread import EngineThread
from daskserve.workers.loading import LoadModel, build_engine, load_model
from daskserve.workers.pulling import Destination, Pull, pull_verified
from daskserve.workers.sequence import Sequence

logger = logging.getLogger(__name__)

OnToken = Callable[[TokenDelta], None]
"""Called on the event loop for every new token."""
OnOutcome = Callable[[Completion | Prefilled | DaskserveError], None]
"""Called on the event loop with what became of every request that somebody waits for."""


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
        What it does; the methods for other roles raise. See `become`.
    config
        The engine's settings.
    load
        Gives the runner and the tokenizer.
    """

    def __init__(self, role: Role, config: EngineConfig, load: LoadModel = load_model) -> None:
        self.role = role
        self.config = config
        self._load_model = load
        name = f"{role.value.lower()} engine"
        self._thread = EngineThread(name, self._on_events, self._on_death)
        self._engine: Engine | None = None
        self._model_digest = ""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lost = ""  # why the instance takes no more requests
        self.on_outcome: OnOutcome = lambda outcome: None
        self._waiters: set[_Waiter] = set()

    def start(self) -> None:
        """Load the model on the engine's thread; blocks until it is ready (ModelError)."""
        self._engine = self._thread.start(
            lambda: build_engine(self.role, self.config, self._load_model)
        )
        self._model_digest = fingerprint(resolve(self.config.model))

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
            model_digest=self._model_digest,
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
        emitted: TokenDelta | None = None,
    ) -> Completion:
        """DECODE: wait for room, pull the KV, decode to the end.

        A KV that cannot be pulled in time, or is not what the handle says, is computed again
        here. Tokens after the first are given to ``on_token``. What an instance that is gone has
        ``emitted``, all of it from the first token on, is computed again instead of the pull and
        goes on from its end: whatever the precision, it is not contradicted.
        """
        self._require(Role.DECODE)
        if prefilled.completion is not None:
            return prefilled.completion
        first_logprob = prefilled.first_logprob
        sequence = Sequence(
            request,
            streams=on_token is not None,
            handle=prefilled.handle,
            output_ids=[prefilled.first_token_id],
            logprobs=[] if first_logprob is None else [first_logprob],
            first_token_at=prefilled.first_token_at,
            prefill_queue_s=prefilled.prefill_queue_s,
            prefill_s=prefilled.prefill_s,
        )
        _resume(sequence, emitted)
        return await self._run(sequence, on_token, pull)

    async def generate(
        self,
        request: Request,
        on_token: OnToken | None = None,
        emitted: TokenDelta | None = None,
    ) -> Completion:
        """COLOCATED: prefill and decode here; ``emitted`` as for `decode`."""
        self._require(Role.COLOCATED)
        sequence = Sequence(request, streams=on_token is not None)
        _resume(sequence, emitted)
        return await self._run(sequence, on_token)

    async def become(self, role: Role) -> bool:
        """Do what another role does from now on; False while the old one still has work."""
        loop = asyncio.get_running_loop()
        changed: asyncio.Future[bool] = loop.create_future()

        def change() -> None:
            loop.call_soon_threadsafe(changed.set_result, self.engine.become(role))

        self._thread.post(change)
        is_changed = await changed
        if is_changed:
            self.role = role
        return is_changed

    def abort(self, request_id: str) -> None:
        """Cancel a request in any state; its caller gets ``RequestCancelled``. Any thread."""
        self._thread.post(partial(self.engine.abort, request_id))

    def export(self, handle: KVHandle) -> list[memoryview] | KVStream:
        """Bytes of the held KV, pinned for ``kv_pull_timeout_s`` or until released. Any thread.

        Raises
        ------
        KVUnavailable
            Unknown, expired or released request, wrong secret, or another layout.
        """
        pages = self.engine.holding.pin(handle, self.engine.clock())
        return self.engine.pool.outgoing(pages)

    def pin_part(self, handle: KVHandle, shard: Shard) -> tuple[tuple[int, ...], int]:
        """Pages of the held KV, pinned as by `export`, and the digest of these layers and heads.

        Any thread; KVUnavailable as `export`.
        """
        return self.engine.holding.pin_piece(handle, shard, self.engine.clock())

    def keep(self, request_ids: Iterable[str]) -> None:
        """Renew the leases of held KV whose decode still waits its turn. Any thread."""
        self.engine.holding.keep(request_ids, self.engine.clock())

    def release(self, request_id: str, secret: bytes) -> None:
        """Give held KV back; does nothing if it is gone or the secret is wrong. Any thread."""
        self._thread.post(partial(self.engine.release, request_id, secret))

    async def close(self, drain_s: float = 0.0) -> None:
        """Stop; requests that are not done after ``drain_s`` seconds get ``InstanceLost``."""
        if self._engine is None:
            return
        self._lost = self._lost or f"the {self.role.value} instance is closing"
        deadline = time.monotonic() + drain_s
        while self.engine.num_sequences and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        await asyncio.to_thread(self._thread.stop)

    def _require(self, role: Role) -> None:
        if self.role is not role:
            raise ValueError(f"this is a {self.role.value} instance, not {role.value}")

    async def _run(
        self, sequence: Sequence, on_token: OnToken | None, pull: Pull | None = None
    ) -> Any:
        if self._lost:
            raise InstanceLost(self._lost)
        self._loop = asyncio.get_running_loop()
        waiter = sequence.waiter = _Waiter(self._loop.create_future(), on_token, pull)
        self._waiters.add(waiter)
        try:
            events = self._thread.try_now(self.engine, sequence)
            if events is None:
                self._thread.post(partial(self.engine.add, sequence))
            else:
                self._dispatch(events)
            return await waiter.result
        except asyncio.CancelledError:
            self._thread.post(partial(self.engine.abort_sequence, sequence))
            result = waiter.result
            if result.done() and not result.cancelled() and result.exception() is None:
                self._release_unclaimed(result.result())
            raise
        finally:
            self._waiters.discard(waiter)

    # Called on the engine's thread.

    def _on_events(self, events: list[Event]) -> None:
        self._call_loop(self._dispatch, events)

    def _on_death(self, cause: BaseException | None) -> None:
        how = "closed" if cause is None else f"lost: {type(cause).__name__}: {cause}"
        self._lost = f"the {self.role.value} instance was {how}"
        self._call_loop(self._fail_waiting)

    def _call_loop(self, function: Callable[..., None], *args: Any) -> None:
        if self._loop is None:
            return
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError:
            logger.warning("the event loop is closed: %s dropped", function.__name__)

    # Called on the event loop.

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
            self._release_unclaimed(payload)
            return
        self.on_outcome(payload)
        if isinstance(payload, DaskserveError):
            waiter.result.set_exception(payload)
        else:
            waiter.result.set_result(payload)

    def _release_unclaimed(self, payload: object) -> None:
        """The caller left at the moment its prefill was done: nobody else would release it."""
        if isinstance(payload, Prefilled) and payload.handle is not None:
            self.release(payload.request_id, payload.handle.secret)

    def _fail_waiting(self) -> None:
        for waiter in list(self._waiters):
            self._settle(waiter, InstanceLost(self._lost))

    def _start_pull(self, sequence: Sequence, reserved: Reserved) -> None:
        waiter: _Waiter = sequence.waiter
        started_at = time.monotonic()
        waiter.pull_task = asyncio.create_task(
            pull_verified(
                Destination(reserved.owner, reserved.pages, self.engine.pool),
                sequence.handle,
                waiter.pull,
                self.config.kv_pull_timeout_s,
            )
        )

        def ended(task: asyncio.Task[None]) -> None:
            error = None if task.cancelled() else task.exception()
            if error is not None:
                request_id = sequence.request.request_id
                logger.warning("pulling the KV of %s failed, computing it: %r", request_id, error)
            succeeded = error is None and not task.cancelled()
            transfer_s = time.monotonic() - started_at
            self._thread.note(
                partial(self.engine.pull_ended, reserved.owner, succeeded, transfer_s)
            )

        waiter.pull_task.add_done_callback(ended)


def _resume(sequence: Sequence, emitted: TokenDelta | None) -> None:
    """Go on from the end of what another instance has emitted."""
    if emitted is not None:
        sequence.handle = None
        sequence.output_ids = list(emitted.token_ids)
        sequence.logprobs = list(emitted.logprobs or ())
        sequence.num_recomputes = 1

"""One stream's request, from its opening to its last token: what is asked of whom, and what then.

Only messages in and messages out, all on one event loop; the scheduler decides where the request
runs, this end remembers what the caller has got so far.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

from daskserve.core.instance import Role
from daskserve.core.request import Completion, Request, Timeline, TokenDelta
from daskserve.errors import (
    ClusterError,
    DaskserveError,
    DeadlineExceeded,
    InstanceLost,
    RequestCancelled,
)
from daskserve.service.link import Link, Message
from daskserve.service.online_wire import (
    ABORT,
    AGAIN,
    BOUND,
    CLOSE,
    COMPLETED,
    LOST,
    OPEN,
    PREFILLED,
    REFUSED,
    RESUME,
    RUN,
    pack_emitted,
    pack_request,
    unpack_completion,
    unpack_error,
)
from daskserve.service.token_stream import TokenListener, TokenStream

_GRACE_S = 1.0
"""An instance that is gone is the scheduler's to notice: this long before we ask for another."""


class Links(Protocol):
    """What a call asks of its service."""

    listener: TokenListener
    is_colocated: bool

    def to_scheduler(self) -> Link: ...
    def to_instance(self, address: str) -> Link: ...
    def closed(self, request_id: str) -> None: ...


class OnlineCall:
    """Runs one request; every method is called on the client's event loop.

    Parameters
    ----------
    request
        With the address of the token listener.
    stream
        Weakly: a stream that nobody keeps cancels its request.
    links
        The service's.
    """

    def __init__(self, request: Request, stream: weakref.ref[TokenStream], links: Links) -> None:
        self._request = request
        self._stream = stream
        self._links = links
        self._scheduler = links.to_scheduler()
        self._instance: Link | None = None
        """To the instance that we wait for."""
        self._run_id = ""
        self._num_before = 0
        """Tokens that the caller had got when this run began."""
        self._prefilled: dict[str, Any] | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._grace: asyncio.TimerHandle | None = None
        self._handlers: dict[str, Callable[[Message], None]] = {
            BOUND: self._on_bound,
            LOST: self._on_lost,
            REFUSED: self._on_refused,
        }

    def open(self, timeout_s: float | None, max_queue: int | None) -> None:
        """Ask for an instance."""
        if timeout_s is not None:
            late = DeadlineExceeded(f"not finished within {timeout_s:g} s")
            self._deadline = _later(timeout_s, lambda: self.fail(late))
        self._scheduler.send(
            {
                "op": OPEN,
                "request_id": self._request.request_id,
                "prompt_tokens": self._request.num_prompt_tokens,
                "max_tokens": self._request.params.max_tokens,
                "is_colocated": self._links.is_colocated,
                "max_queue": max_queue,
            }
        )

    def on_scheduler(self, message: Message) -> None:
        self._handlers[message["op"]](message)

    def on_instance(self, message: Message) -> None:
        """An answer; one of a run that was given up is nobody's."""
        if message["run_id"] != self._run_id or self._instance is None:
            return
        if message["op"] == PREFILLED:
            self._on_prefilled(message["prefilled"])
        elif message["op"] == COMPLETED:
            self._finish(unpack_completion(message["completion"]))
        else:
            error = unpack_error(message["error"])
            if isinstance(error, InstanceLost | RequestCancelled):
                self._on_unreachable()
            else:
                self.fail(error)

    def on_end_of(self, link: Link) -> None:
        """A link of the service has ended."""
        if link is self._scheduler:
            self.fail(ClusterError("the connection to the scheduler broke"))
        elif link is self._instance:
            self._on_unreachable()

    def fail(self, error: DaskserveError) -> None:
        """End it in whatever state; the reader gets the error after the tokens that did come."""
        self._close(is_done=False)
        if (stream := self._stream()) is not None:
            stream.fail(error)

    def abandon(self) -> None:
        """Nobody listens any more."""
        self._close(is_done=False)

    # Messages of the scheduler.

    def _on_bound(self, message: Message) -> None:
        stream = self._stream()
        if stream is None:
            return  # its end is on its way here
        self._run_id = message["run_id"]
        self._instance = self._links.to_instance(message["address"])
        self._links.listener.add(self._run_id, stream)
        role = Role(message["role"])
        emitted = stream.so_far()
        self._num_before = len(emitted.token_ids) if emitted is not None else 0
        if role is Role.DECODE:
            self._num_before = max(self._num_before, 1)  # its prefill's, perhaps still on its way
        self._instance.send(
            {
                "op": RUN,
                "run_id": self._run_id,
                "role": role.value,
                "request": pack_request(replace(self._request, request_id=self._run_id)),
                "prefilled": self._prefilled if role is Role.DECODE else None,
                "emitted": pack_emitted(emitted if self._is_resumed(role) else None),
            }
        )

    def _on_lost(self, message: Message) -> None:
        self._leave_instance()
        stream = self._stream()
        emitted = stream.so_far() if stream is not None else None
        if emitted is not None and emitted.finish_reason is not None:
            self._finish(self._completion_of(emitted))  # only the answer itself got lost
            return
        has_progress = emitted is not None and len(emitted.token_ids) > self._num_before
        self._scheduler.send(
            {
                "op": RESUME,
                "request_id": self._request.request_id,
                "run_id": message["run_id"],
                "has_progress": has_progress,
            }
        )

    def _on_refused(self, message: Message) -> None:
        self.fail(unpack_error(message["error"]))

    # What they come to.

    def _on_unreachable(self) -> None:
        """Unless the scheduler says first that the instance is gone, say so to it."""
        if self._grace is None:
            again = {
                "op": AGAIN,
                "request_id": self._request.request_id,
                "run_id": self._run_id,
            }
            self._grace = _later(_GRACE_S, lambda: self._scheduler.send(again))

    def _is_resumed(self, role: Role) -> bool:
        """Whether an instance must go on from what an earlier run has emitted."""
        if role is Role.DECODE:
            return self._prefilled["request_id"] != self._run_id
        return role is Role.COLOCATED

    def _on_prefilled(self, prefilled: dict[str, Any]) -> None:
        if prefilled["completion"] is not None:
            self._finish(unpack_completion(prefilled["completion"]))
            return
        stream = self._stream()
        emitted = stream.so_far() if stream is not None else None
        if emitted is not None:  # perhaps of an earlier run: what was sent stands
            prefilled["first_token_id"] = emitted.token_ids[0]
            prefilled["first_logprob"] = emitted.logprobs[0] if emitted.logprobs else None
        self._prefilled = prefilled
        self._instance = None
        message = {"request_id": self._request.request_id, "run_id": self._run_id}
        self._scheduler.send({"op": PREFILLED, **message})

    def _completion_of(self, emitted: TokenDelta) -> Completion:
        known = self._prefilled or {"prefill_queue_s": 0.0, "prefill_s": 0.0}
        return Completion(
            self._request.request_id,
            emitted.text,
            emitted.token_ids,
            emitted.finish_reason,
            self._request.num_prompt_tokens,
            Timeline(known["prefill_queue_s"], known["prefill_s"]),
            emitted.logprobs,
        )

    def _finish(self, completion: Completion) -> None:
        stream = self._stream()
        if stream is not None:
            stream.finish(replace(completion, request_id=self._request.request_id))
        self._close(is_done=True)

    def _leave_instance(self) -> None:
        """Whatever still comes of this run is not listened to."""
        if self._grace is not None:
            self._grace.cancel()
            self._grace = None
        self._links.listener.remove(self._run_id)
        if self._instance is not None:
            self._instance.send({"op": ABORT, "run_id": self._run_id})
            self._instance = None

    def _close(self, is_done: bool) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        if is_done:
            self._instance = None
        self._leave_instance()
        self._scheduler.send(
            {"op": CLOSE, "request_id": self._request.request_id, "is_done": is_done}
        )
        self._links.closed(self._request.request_id)


def _later(delay_s: float, call: Callable[[], None]) -> asyncio.TimerHandle:
    return asyncio.get_running_loop().call_later(delay_s, call)

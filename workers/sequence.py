"""The state of one request inside an engine, from the queue to its last token."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING, Any

import numpy as np

from daskserve.core.kv import KVHandle
from daskserve.core.request import Request, TokenLogprob
from daskserve.text.detokenizer import Detokenizer

if TYPE_CHECKING:
    from daskserve.workers.wave import Wave

_owners = itertools.count(1)


class State(Enum):
    """Where a sequence is; every state but DONE is left through the engine only."""

    WAITING = auto()
    """In the queue, without pages."""
    PULLING = auto()
    """Pages reserved, its KV is on its way into them."""
    COMPUTING = auto()
    """Pages reserved, its prompt is (being) computed here."""
    RUNNING = auto()
    """In the decode batch."""
    DONE = auto()


@dataclass(slots=True, eq=False)
class Sequence:
    """One request in an engine.

    Parameters
    ----------
    request
        What was asked.
    streams
        Whether token deltas are wanted before the end.
    address
        PREFILL: where the KV can be pulled from, for its handle.
    handle
        DECODE: the KV to pull; None computes the prompt here.
    output_ids, logprobs
        Tokens sampled so far; ``logprobs`` has one entry for each if the request asks for them.
    first_token_at, prefill_queue_s, prefill_s
        Seconds on the service clock and durations, as in ``Timeline``.
    """

    request: Request
    streams: bool = False
    address: str = ""
    handle: KVHandle | None = None
    output_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    first_token_at: float | None = None
    prefill_queue_s: float = 0.0
    prefill_s: float = 0.0

    state: State = State.WAITING
    owner: int = 0
    """Who the pages belong to; a new number for every reservation."""
    wave: Wave | None = None
    """Where an engine that decodes computes it, while it has pages."""
    admission: int = 0
    num_computed: int = 0
    """Tokens whose KV is in the pages."""
    num_recomputes: int = 0
    kv_transfer_s: float = 0.0
    prefill_started_at: float | None = None
    decode_started_at: float | None = None
    detokenizer: Detokenizer | None = None
    waiter: Any = None
    """Belongs to whoever submitted the sequence; the engine does not look at it."""
    _token_ids: np.ndarray | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.request.prompt_token_ids) + len(self.output_ids)

    @property
    def num_uncomputed(self) -> int:
        return self.num_tokens - self.num_computed

    @property
    def max_pool_tokens(self) -> int:
        """Most tokens whose KV is ever needed: the last output token is never fed back."""
        return self.request.max_total_tokens - 1

    def new_owner(self) -> int:
        self.owner = next(_owners)
        return self.owner

    def next_tokens(self, count: int) -> np.ndarray:
        """The next ``count`` tokens to compute, int64."""
        if self._token_ids is None or len(self._token_ids) != self.num_tokens:
            ids = (*self.request.prompt_token_ids, *self.output_ids)
            self._token_ids = np.array(ids, dtype=np.int64)
        return self._token_ids[self.num_computed : self.num_computed + count]

    def lose_kv(self) -> None:
        """Its KV is gone or never came: everything is to be computed here."""
        if self.num_computed or self.handle is not None:
            self.num_recomputes += 1
        self.num_computed = 0
        self.handle = None

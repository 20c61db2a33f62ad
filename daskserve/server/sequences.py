"""The answers to one HTTP request while they are made: a token stream each, merged."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

from daskserve.core.request import FinishReason, Request, TokenDelta
from daskserve.server.logprobs import LogprobWriter
from daskserve.server.shapes import Piece
from daskserve.service.token_stream import TokenStream

_QUEUE_SIZE = 64


@dataclass(slots=True)
class Answer:
    """One answer in the making.

    Parameters
    ----------
    index
        Of the choice.
    prefix
        Text that comes before the answer's own: the prompt, when it is echoed.
    logprobs
        Writes log-probabilities when they are asked for.
    on_first_token
        Told once.
    """

    index: int
    request: Request
    stream: TokenStream
    prefix: str = ""
    logprobs: LogprobWriter | None = None
    on_first_token: Callable[[], None] = lambda: None
    num_output_tokens: int = 0
    finish_reason: FinishReason | None = None
    token_times_s: list[float] = field(default_factory=list)
    """When deltas came, of the monotonic clock: the first and the last."""

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first, None when there is none."""
        num_gaps = self.num_output_tokens - 1
        if num_gaps < 1:
            return None
        return (self.token_times_s[-1] - self.token_times_s[0]) / num_gaps

    async def pieces(self) -> AsyncIterator[Piece]:
        """What there is to send, as it comes."""
        async for delta in self.stream:
            yield self._piece(delta)

    def _piece(self, delta: TokenDelta) -> Piece:
        is_first = self.num_output_tokens == 0
        if is_first:
            self.on_first_token()
        self.token_times_s[not is_first :] = [time.monotonic()]
        self.num_output_tokens += len(delta.token_ids)
        self.finish_reason = delta.finish_reason
        text = self.prefix + delta.text if is_first else delta.text
        logprobs = self.logprobs.write(delta) if self.logprobs else None
        return Piece(self.index, text, delta.finish_reason, is_first, logprobs)


async def merged(answers: Sequence[Answer]) -> AsyncIterator[Piece]:
    """Pieces of all answers; one that fails ends them all with its error."""
    if len(answers) == 1:  # almost always, and each token takes a shorter way
        async for piece in answers[0].pieces():
            yield piece
        return
    queue: asyncio.Queue[Piece | Exception | None] = asyncio.Queue(_QUEUE_SIZE)
    tasks = [asyncio.create_task(_forward(answer, queue)) for answer in answers]
    num_left = len(tasks)
    try:
        while num_left:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                num_left -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _forward(answer: Answer, queue: asyncio.Queue[Piece | Exception | None]) -> None:
    try:
        async for piece in answer.pieces():
            await queue.put(piece)
        await queue.put(None)
    except Exception as error:
        await queue.put(error)

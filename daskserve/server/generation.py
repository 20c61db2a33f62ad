"""One HTTP request for completions, from its body to the last byte of its answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from daskserve.config import ServeSettings
from daskserve.core.request import FinishReason, Request, TokenDelta
from daskserve.server.admission import Admission
from daskserve.server.body import read_json
from daskserve.server.errors import refusal_of
from daskserve.server.events import DONE, EventSender, until_gone
from daskserve.server.fields import Ask, params_of_choice, read_ask
from daskserve.server.shapes import Envelope, Piece, Usage
from daskserve.service import Service
from daskserve.service.token_stream import TokenStream

_SMALL_BODY_CHARS = 20_000
_QUEUE_SIZE = 64


@dataclass(slots=True)
class Sequence:
    """One answer in the making."""

    index: int
    request: Request
    stream: TokenStream
    num_output_tokens: int = 0
    finish_reason: FinishReason | None = None


class Generation:
    """The route of ``/v1/completions``, or of ``/v1/chat/completions``. An ASGI application.

    Parameters
    ----------
    service
        Asynchronous, on this event loop.
    model
        The name that is served.
    """

    def __init__(
        self,
        service: Service,
        model: str,
        limits: ServeSettings,
        admission: Admission,
        is_chat: bool,
    ) -> None:
        self._service, self._model, self._limits = service, model, limits
        self._admission, self._is_chat = admission, is_chat

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        limits = self._limits
        with self._admission.place() as place:
            body = await read_json(scope, receive, limits.max_body_bytes, limits.read_timeout_s)
            ask = read_ask(body, self._is_chat, self._model, limits)
            place.grow(ask.num_sequences)
            del body
            requests = await self._validated(ask)
            sequences: list[Sequence] = []
            try:
                for index, request in enumerate(requests):
                    stream = self._service.stream_request(
                        request, timeout_s=limits.request_timeout_s
                    )
                    sequences.append(Sequence(index, request, stream))
                if ask.is_stream:
                    sender = EventSender(send, limits.write_timeout_s)
                    await until_gone(receive, self._stream(ask, sequences, sender))
                else:
                    whole = await until_gone(receive, self._whole(ask, sequences))
                    await JSONResponse(whole)(scope, receive, send)
            finally:
                for sequence in sequences:
                    await sequence.stream.aclose()

    async def _validated(self, ask: Ask) -> list[Request]:
        """A request per answer, choices of one prompt side by side."""
        return [
            self._service.validate(prompt, params_of_choice(ask.params, choice))
            for prompt in ask.prompts
            for choice in range(ask.num_choices)
        ]

    async def _whole(self, ask: Ask, sequences: list[Sequence]) -> dict[str, Any]:
        texts: list[list[str]] = [[] for _ in sequences]
        async for sequence, delta in _merged(sequences):
            texts[sequence.index].append(delta.text)
        pieces = [Piece(s.index, "".join(texts[s.index]), s.finish_reason) for s in sequences]
        return Envelope(ask.is_chat, self._model).whole(pieces, _usage(ask, sequences))

    async def _stream(self, ask: Ask, sequences: list[Sequence], sender: EventSender) -> None:
        envelope = Envelope(ask.is_chat, self._model)
        try:
            async for sequence, delta in _merged(sequences):
                is_first = delta.first_index == 0
                piece = Piece(sequence.index, delta.text, delta.finish_reason, is_first)
                chunk = envelope.chunk(piece)
                if ask.usage_on_every_chunk:
                    chunk["usage"] = _usage(ask, sequences).shape()
                elif ask.include_usage:
                    chunk["usage"] = None
                await sender.event(chunk)
            if ask.include_usage:
                await sender.event(envelope.usage_chunk(_usage(ask, sequences)))
        except Exception as error:
            if not sender.is_started:
                raise
            await sender.event(refusal_of(error).body())
            await sender.finish(b"")
            return
        await sender.finish(DONE)


def _usage(ask: Ask, sequences: list[Sequence]) -> Usage:
    prompts = sequences[:: ask.num_choices]
    return Usage(
        sum(sequence.request.num_prompt_tokens for sequence in prompts),
        sum(sequence.num_output_tokens for sequence in sequences),
    )


async def _merged(sequences: list[Sequence]) -> AsyncIterator[tuple[Sequence, TokenDelta]]:
    """Deltas of all sequences as they come."""
    if len(sequences) == 1:
        async for delta in _noted(sequences[0]):
            yield sequences[0], delta
        return
    queue: asyncio.Queue[tuple[Sequence, TokenDelta] | None | Exception] = asyncio.Queue(
        _QUEUE_SIZE
    )

    async def forward(sequence: Sequence) -> None:
        try:
            async for delta in _noted(sequence):
                await queue.put((sequence, delta))
            await queue.put(None)
        except Exception as error:
            await queue.put(error)

    tasks = [asyncio.create_task(forward(sequence)) for sequence in sequences]
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


async def _noted(sequence: Sequence) -> AsyncIterator[TokenDelta]:
    async for delta in sequence.stream:
        sequence.num_output_tokens += len(delta.token_ids)
        sequence.finish_reason = delta.finish_reason
        yield delta

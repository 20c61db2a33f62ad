"""One HTTP request for completions, from its body to the last byte of its answer."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from daskserve.batch.prompts import Prompt
from daskserve.config import ServeSettings
from daskserve.core.request import Request
from daskserve.errors import ContextOverflow, NeverFits
from daskserve.server.admission import Admission, Place
from daskserve.server.body import parsed, read_body
from daskserve.server.errors import Refusal, code_of, report
from daskserve.server.events import DONE, ClientGone, EventSender, until_gone
from daskserve.server.fields import Ask, read_ask, seed_of_choice
from daskserve.server.logprobs import LogprobWriter, joined
from daskserve.server.metrics import Metrics
from daskserve.server.sequences import Answer, merged
from daskserve.server.shapes import JSON, Envelope, Piece, Usage
from daskserve.service import Service

_SMALL_BODY_BYTES = 16 * 1024
"""Parsed and tokenized at once; more in a thread, so that no token has to wait for it."""


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
        metrics: Metrics,
        is_chat: bool,
    ) -> None:
        self._service, self._model, self._limits = service, model, limits
        self._admission, self._metrics, self._is_chat = admission, metrics, is_chat

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._serve(scope, receive, send)
        except (ClientGone, ClientDisconnect):
            self._metrics.failed("client_gone")
            raise
        except Exception as error:
            self._metrics.failed(code_of(error))
            raise

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        limits, arrived_at = self._limits, time.monotonic()
        with self._admission.place(scope["state"].get("key")) as place:
            data = await read_body(scope, receive, limits.max_body_bytes, limits.read_timeout_s)
            if len(data) <= _SMALL_BODY_BYTES:
                ask, requests = self._read(data)
            else:
                ask, requests = await asyncio.to_thread(self._read, data)
            del data
            place.grow(ask.num_sequences)
            answers: list[Answer] = []
            try:
                self._begin(ask, requests, answers, place)
                if ask.is_stream:
                    failure = await self._streamed(receive, send, ask, answers)
                    if failure is not None:
                        report(scope["state"]["request_id"], failure)
                        self._metrics.failed(code_of(failure))
                        return
                else:
                    whole = await until_gone(receive, self._whole(ask, answers))
                    await JSON(whole)(scope, receive, send)
                for answer in answers:
                    completion = await answer.stream.completion()
                    self._metrics.finished(answer, completion, arrived_at)
                    ttft_s = answer.token_times_s[0] - arrived_at
                    place.finished(ttft_s, answer.tpot_s, completion)
            finally:
                for answer in answers:
                    await answer.stream.aclose()

    def _read(self, data: bytes) -> tuple[Ask, list[Request]]:
        """What is asked, and a request per prompt."""
        ask = read_ask(parsed(data), self._is_chat, self._model, self._limits)
        try:
            return ask, [self._validated(prompt, ask) for prompt in ask.prompts]
        except ContextOverflow as error:
            param = "messages" if ask.is_chat else "prompt"
            raise Refusal(400, str(error), param, error.code) from None

    def _validated(self, prompt: Prompt, ask: Ask) -> Request:
        try:
            return self._service.validate(prompt, ask.params)
        except NeverFits:
            if ask.is_limited:
                raise
        # The default length was our choice, so a KV pool that is too small for it makes it less.
        shortest = self._service.validate(prompt, replace(ask.params, max_tokens=1))
        max_tokens = ask.params.max_tokens // 2
        while max_tokens > 1:
            params = replace(ask.params, max_tokens=max_tokens)
            with contextlib.suppress(NeverFits):
                return self._service.validate(shortest.prompt_token_ids, params)
            max_tokens //= 2
        return shortest

    def _begin(
        self, ask: Ask, requests: Sequence[Request], answers: list[Answer], place: Place
    ) -> None:
        """Submit a request per answer, choices of one prompt side by side."""
        for prompt, request in zip(ask.prompts, requests, strict=True):
            prefix = self._text_of(prompt) if ask.echo else ""
            for choice in range(ask.num_choices):
                own = _of_choice(request, choice)
                stream = self._service.stream_request(own, timeout_s=self._limits.request_timeout_s)
                writer = None
                if ask.params.logprobs is not None:
                    writer = LogprobWriter(self._service.tokenizer, ask.is_chat, len(prefix))
                answers.append(Answer(len(answers), own, stream, prefix, writer, place.first_token))

    def _text_of(self, prompt: Any) -> str:
        return prompt if isinstance(prompt, str) else self._service.tokenizer.decode(prompt)

    async def _whole(self, ask: Ask, answers: list[Answer]) -> dict[str, Any]:
        parts: list[list[Piece]] = [[] for _ in answers]
        async for piece in merged(answers):
            parts[piece.index].append(piece)
        pieces = [
            Piece(
                answer.index,
                "".join(piece.text for piece in own),
                answer.finish_reason,
                logprobs=joined([piece.logprobs for piece in own if piece.logprobs]),
            )
            for answer, own in zip(answers, parts, strict=True)
        ]
        return Envelope(ask.is_chat, self._model).whole(pieces, _usage(ask, answers))

    async def _streamed(
        self, receive: Receive, send: Send, ask: Ask, answers: list[Answer]
    ) -> Exception | None:
        """What went wrong after the first event, which the client has been told."""
        sender = EventSender(send)
        pings = asyncio.create_task(sender.keep_alive(self._limits.ping_interval_s))
        try:
            return await until_gone(receive, self._stream(ask, answers, sender))
        except Refusal as stopping:
            if not sender.is_started:
                raise
            await sender.fail(stopping)
            return stopping
        finally:
            pings.cancel()

    async def _stream(
        self, ask: Ask, answers: list[Answer], sender: EventSender
    ) -> Exception | None:
        """Send all events."""
        envelope = Envelope(ask.is_chat, self._model)
        try:
            async for piece in merged(answers):
                chunk = envelope.chunk(piece)
                if ask.include_usage:
                    usage = _usage(ask, answers).shape() if ask.usage_on_every_chunk else None
                    chunk["usage"] = usage
                await sender.event(chunk)
            if ask.include_usage:
                chunk = envelope.usage_chunk(_usage(ask, answers))
                if ask.include_timeline:
                    timelines = [(await a.stream.completion()).timeline for a in answers]
                    chunk["daskserve"] = {"timelines": timelines}
                await sender.event(chunk)
        except Exception as error:
            if isinstance(error, ClientGone) or not sender.is_started:
                raise  # to nobody, or as a status of its own
            await sender.fail(error)
            return error
        await sender.finish(DONE)
        return None


def _of_choice(request: Request, choice: int) -> Request:
    if choice == 0:
        return request
    request_id = f"{request.request_id}-{choice}"
    return replace(request, request_id=request_id, seed=seed_of_choice(request.seed, choice))


def _usage(ask: Ask, answers: list[Answer]) -> Usage:
    """Each prompt counts once, however many choices it has."""
    return Usage(
        sum(answer.request.num_prompt_tokens for answer in answers[:: ask.num_choices]),
        sum(answer.num_output_tokens for answer in answers),
    )

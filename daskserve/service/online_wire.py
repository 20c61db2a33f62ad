"""Messages of online requests, between a service, the scheduler and the instances.

Plain values for msgpack: nothing is pickled, and what does not fit is refused by the dataclasses.
"""

from __future__ import annotations

from array import array
from dataclasses import fields
from typing import Any

from daskserve import errors
from daskserve.core.kv import KVHandle
from daskserve.core.params import SamplingParams
from daskserve.core.request import (
    Completion,
    FinishReason,
    Prefilled,
    Request,
    Timeline,
    TokenDelta,
    TokenLogprob,
)
from daskserve.errors import DaskserveError
from daskserve.service.token_wire import body_of, delta_of

# A service to the scheduler. One request is opened once and closed once.
OPEN, PREFILLED, AGAIN, RESUME, CLOSE = "open", "prefilled", "again", "resume", "close"
# The scheduler to a service.
BOUND, LOST, REFUSED = "bound", "lost", "refused"
# A service to an instance.
RUN, ABORT = "run", "abort"
# An instance to a service; it says PREFILLED too.
COMPLETED, FAILED = "completed", "failed"

_MAX_ARG_CHARS = 200


def pack_request(request: Request) -> dict[str, Any]:
    return {
        "request_id": request.request_id,
        "prompt": array("I", request.prompt_token_ids).tobytes(),
        "params": {f.name: getattr(request.params, f.name) for f in fields(SamplingParams)},
        "submitted_at": request.submitted_at,
        "seed": request.seed,
        "token_sink": request.token_sink,
    }


def unpack_request(packed: dict[str, Any]) -> Request:
    return Request(
        request_id=packed["request_id"],
        prompt_token_ids=tuple(array("I", packed["prompt"])),
        params=SamplingParams(**packed["params"]),
        submitted_at=packed["submitted_at"],
        seed=packed["seed"],
        token_sink=packed["token_sink"],
    )


def pack_prefilled(prefilled: Prefilled) -> dict[str, Any]:
    values = {f.name: getattr(prefilled, f.name) for f in fields(Prefilled)}
    handle, answer = prefilled.handle, prefilled.completion
    values["handle"] = handle and {f.name: getattr(handle, f.name) for f in fields(KVHandle)}
    values["completion"] = answer and pack_completion(answer)
    return values


def unpack_prefilled(packed: dict[str, Any]) -> Prefilled:
    handle, answer, logprob = packed["handle"], packed["completion"], packed["first_logprob"]
    unpacked = {
        "handle": handle and KVHandle(**handle),
        "completion": answer and unpack_completion(answer),
        "first_logprob": logprob and TokenLogprob(*logprob),
    }
    return Prefilled(**{**packed, **unpacked})


def pack_completion(completion: Completion) -> dict[str, Any]:
    values = {f.name: getattr(completion, f.name) for f in fields(Completion)}
    timeline = completion.timeline
    values["finish_reason"] = completion.finish_reason.value
    values["timeline"] = {f.name: getattr(timeline, f.name) for f in fields(Timeline)}
    return values


def unpack_completion(packed: dict[str, Any]) -> Completion:
    logprobs = packed["logprobs"]
    unpacked = {
        "finish_reason": FinishReason(packed["finish_reason"]),
        "timeline": Timeline(**packed["timeline"]),
        "logprobs": logprobs and tuple(TokenLogprob(*entry) for entry in logprobs),
    }
    return Completion(**{**packed, **unpacked})


def pack_emitted(emitted: TokenDelta | None) -> list[Any] | None:
    return None if emitted is None else body_of(emitted)


def unpack_emitted(packed: tuple[Any, ...] | None) -> TokenDelta | None:
    return None if packed is None else delta_of(packed)


def pack_error(error: DaskserveError) -> list[Any]:
    """The class by its name in `daskserve.errors`, and its arguments."""
    args = error.__reduce__()[1]
    plain = [a if isinstance(a, int | float) else str(a)[:_MAX_ARG_CHARS] for a in args]
    return [type(error).__name__, *plain]


def unpack_error(packed: tuple[Any, ...]) -> DaskserveError:
    name, *args = packed
    kind = getattr(errors, name, None)
    if not (isinstance(kind, type) and issubclass(kind, DaskserveError)):
        kind = DaskserveError
    return kind(*args)

"""Errors as OpenAI's clients expect them: a status, and an object that names the field.

Nothing of the inside gets out: errors that are not about the request keep their message here.
"""

from __future__ import annotations

import logging
import math
import traceback
from dataclasses import dataclass, field
from typing import Any

from daskserve.errors import (
    ClusterError,
    DaskserveError,
    DeadlineExceeded,
    EngineStepFailed,
    InstanceLost,
    KilledInstance,
    Overloaded,
    RequestCancelled,
    RequestError,
)
from daskserve.server.shapes import JSON

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Refusal(Exception):
    """An answer that is an error.

    Parameters
    ----------
    status
        HTTP status.
    message
        For the caller to read.
    param
        The field at fault, if it is one.
    code
        Stable, for machines.
    retry_after_s
        When another try makes sense.
    """

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    retry_after_s: float | None = None
    headers: dict[str, str] = field(default_factory=dict)

    def body(self) -> dict[str, Any]:
        """The OpenAI error object."""
        return {
            "error": {
                "message": self.message,
                "type": _kind(self.status),
                "param": self.param,
                "code": self.code,
            }
        }

    def response(self) -> JSON:
        headers = dict(self.headers)
        if self.retry_after_s is not None:
            headers["retry-after"] = str(max(1, math.ceil(self.retry_after_s)))
        return JSON(self.body(), self.status, headers)


def _kind(status: int) -> str:
    kinds = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
    return kinds.get(status) or ("server_error" if status >= 500 else "invalid_request_error")


def refusal_of(error: Exception) -> Refusal:
    """What a caller is told of an error; `Refusal` itself is passed on."""
    match error:
        case Refusal():
            return error
        case DeadlineExceeded() | TimeoutError():
            return Refusal(504, "the answer was not complete in time", code="deadline_exceeded")
        case Overloaded():
            message = "the server is at its limit; try again later"
            return Refusal(429, message, code=error.code, retry_after_s=error.retry_after_s)
        case EngineStepFailed() | KilledInstance():
            return Refusal(500, "the engine failed on this request", code=error.code)
        case RequestCancelled():
            return Refusal(503, "the request was cancelled by the server", code=error.code)
        case RequestError():
            code = None if error.code == "invalid_row" else error.code
            return Refusal(400, str(error), getattr(error, "field", None), code)
        case InstanceLost() | ClusterError():
            message = "no instance can take the request now; try again"
            return Refusal(503, message, code="unavailable", retry_after_s=5)
        case DaskserveError():
            return Refusal(500, "the server cannot answer this request", code="internal_error")
    return Refusal(500, "internal error", code="internal_error")


def code_of(error: Exception) -> str:
    """For counting: one of a few names, never a caller's text."""
    return refusal_of(error).code or "invalid_request"


def report(request_id: str, error: Exception) -> None:
    """Log an error that is not the caller's, without its message: that may hold what one wrote."""
    if isinstance(error, Refusal) or refusal_of(error).status < 500:
        return
    frames = traceback.extract_tb(error.__traceback__)
    places = " < ".join(f"{f.filename}:{f.lineno} {f.name}" for f in reversed(frames[-5:]))
    logger.error("request %s failed: %s at %s", request_id, type(error).__name__, places)

"""Lists page by page, as OpenAI's clients walk through them."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from daskserve.server.errors import Refusal
from daskserve.server.shapes import JSON


def page(request: Request, records: list[dict[str, Any]], default: int, most: int) -> Response:
    """Those after the id ``after``, the newest first unless ``order=asc``.

    Parameters
    ----------
    records
        The oldest first.
    default, most
        Records of a page that gives no ``limit``, and the largest limit.
    """
    query = request.query_params
    if query.get("order", "desc") not in ("asc", "desc"):
        raise Refusal(400, "order must be asc or desc", "order", "invalid_parameter")
    if query.get("order", "desc") == "desc":
        records = records[::-1]
    limit = _limit(query.get("limit"), default, most)
    if (after := query.get("after")) is not None:
        places = [i for i, record in enumerate(records) if record["id"] == after]
        if not places:
            raise Refusal(400, "after is no id of this list", "after", "invalid_parameter")
        records = records[places[0] + 1 :]
    shown = records[:limit]
    return JSON(
        {
            "object": "list",
            "data": shown,
            "first_id": shown[0]["id"] if shown else None,
            "last_id": shown[-1]["id"] if shown else None,
            "has_more": len(records) > limit,
        }
    )


def _limit(given: str | None, default: int, most: int) -> int:
    if given is None:
        return default
    if not (given.isascii() and given.isdecimal() and len(given) < 8 and 1 <= int(given) <= most):
        raise Refusal(400, f"limit must be 1..{most}", "limit", "invalid_parameter")
    return int(given)

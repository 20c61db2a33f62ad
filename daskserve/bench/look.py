"""A look at the server before the first request: is it there, what does it serve, is it ours."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import Any

import httpx

from daskserve.bench.exchange import Failure, failure_of, refusal_of
from daskserve.bench.target import Target
from daskserve.errors import DaskserveError

_TIMEOUT_S = 10.0
_PAUSE_S = 0.5
OURS = "daskserve"


class NoServer(DaskserveError):
    """The server cannot be benchmarked; the message says why."""


async def looked_at(target: Target, wait_s: float) -> tuple[Target, int | None]:
    """The target with its model and what it can tell, and how many instances serve.

    Parameters
    ----------
    wait_s
        How long to wait for a server that is not there yet, or still loads its model.

    Raises
    ------
    NoServer
        Not there, a wrong key, another model, or a model that is still loading.
    """
    deadline = time.monotonic() + wait_s
    async with target.client(target.verify()) as client:
        while True:
            try:
                return await _look(client, target)
            except Failure as failure:
                is_final = failure.kind.startswith(("4", "model"))
                if is_final or time.monotonic() + _PAUSE_S > deadline:
                    raise NoServer(_said(target, failure, is_final, wait_s)) from None
            await asyncio.sleep(_PAUSE_S)


def _said(target: Target, failure: Failure, is_final: bool, wait_s: float) -> str:
    hint = "" if is_final or wait_s else "; --ready-timeout waits for a server that starts"
    return f"{target.url}: {failure.kind}: {failure}{hint}"


async def _look(client: httpx.AsyncClient, target: Target) -> tuple[Target, int | None]:
    try:
        served = await _get(client, "/v1/models")
    except Failure as failure:
        if failure.kind.startswith("404") and target.model:  # not every server lists them
            return target, None
        raise
    try:
        models = {str(model["id"]): model for model in served["data"]}
    except (KeyError, TypeError):
        raise Failure("bad answer", "/v1/models lists none: is this an OpenAI server?") from None
    name = target.model or (next(iter(models)) if len(models) == 1 else "")
    if name not in models:
        asked = f"model {name!r} is not served" if name else "give --model"
        raise Failure("model", f"{asked}; the server has {', '.join(models) or 'none'}")
    is_ours = models[name].get("owned_by") == OURS
    instances = await _num_instances(client) if is_ours else None
    return replace(target, model=name, has_timelines=is_ours), instances


async def _num_instances(client: httpx.AsyncClient) -> int:
    """Instances that take requests, of all roles (Failure while one is missing)."""
    try:
        ready = await _get(client, "/ready")
    except Failure as failure:
        if failure.kind == "503":
            message = "the model is loading, or a role has no instance"
            raise Failure("503 not ready", message) from None
        raise
    return sum(counts["ready"] for counts in ready["roles"].values())


async def _get(client: httpx.AsyncClient, path: str) -> Any:
    try:
        async with asyncio.timeout(_TIMEOUT_S), client.stream("GET", path) as response:
            if response.status_code != 200:
                raise await refusal_of(response)
            await response.aread()
            return response.json()
    except Exception as error:
        if isinstance(error, ValueError):
            raise Failure("bad answer", f"{path} is not JSON: is this an OpenAI server?") from None
        raise failure_of(error, _TIMEOUT_S) from None

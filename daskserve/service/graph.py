"""Requests as a Dask graph: many in one message cost the scheduler half of one each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from uuid import uuid4

import dask
from dask._expr import LLGExpr
from dask._task_spec import Task, TaskRef
from distributed import Client, Future

from daskserve.core.instance import Role
from daskserve.core.request import Request
from daskserve.service import tasks
from daskserve.service.names import ANNOTATION, Facts, decode_key, prefill_key, request_id_of

_COLOCATED = {Role.COLOCATED.value: 1}


def submit_graph(
    client: Client, requests: Sequence[Request], is_colocated: bool
) -> list[tuple[Future, Future | None]]:
    """Send requests to the scheduler in one graph.

    Returns
    -------
    list
        Per request the future of its completion, and of its prefill unless colocated.
    """
    graph: dict[str, Task] = {}
    keys: list[tuple[str, str | None]] = []
    for request in requests:
        request_id = request.request_id
        decode = decode_key(request_id)
        if is_colocated:
            graph[decode] = Task(decode, tasks.generate, request)
            keys.append((decode, None))
            continue
        prefill = prefill_key(request_id)
        graph[prefill] = Task(prefill, tasks.prefill, request)
        graph[decode] = Task(decode, tasks.decode, request, TaskRef(prefill))
        keys.append((decode, prefill))
    # A token of its own, as Client.submit does: hashing every prompt would be slow.
    expression = LLGExpr(graph, _determ_token=uuid4().hex)
    annotations: dict[str, Any] = {
        "resources": _COLOCATED if is_colocated else role_resources,
        ANNOTATION: FactsByKey(
            {
                r.request_id: Facts(r.num_prompt_tokens, r.params.max_tokens, position)
                for position, r in enumerate(requests)
            }
        ),
    }
    with dask.annotate(**annotations):
        futures = client.get(expression, list(graph), sync=False, fifo_timeout=0)
    by_key = dict(zip(graph, futures, strict=True))
    return [(by_key[decode], by_key.get(prefill)) for decode, prefill in keys]


def role_resources(key: str) -> dict[str, int]:
    """Resource annotation of a task in disaggregated mode; the scheduler calls it."""
    role = Role.PREFILL if key == prefill_key(request_id_of(key) or "") else Role.DECODE
    return {role.value: 1}


class FactsByKey:
    """Annotation of every task of a graph; the scheduler calls it with each key."""

    def __init__(self, by_request: dict[str, Facts]) -> None:
        self._by_request = by_request

    def __call__(self, key: str) -> Facts:
        return self._by_request[request_id_of(key)]

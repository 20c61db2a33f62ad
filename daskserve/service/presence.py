"""What the processes of a cluster say of themselves: who they are, and what they run.

Asked through Dask's own ``run``, before anything of ours is installed there: so the answer is
plain values, and a process without daskserve, or with another one, is an answer too.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from distributed import Client, Worker

from daskserve.config import settings
from daskserve.core.instance import Role
from daskserve.host.gpus import gpus, visible_gpus
from daskserve.host.packages import versions, wire_digest
from daskserve.service.names import role_of

_ASK_TIMEOUT_S = 60.0  # the first question imports daskserve there, perhaps from a slow disk


@dataclass(frozen=True, slots=True)
class Presence:
    """One process.

    Parameters
    ----------
    who
        ``client``, ``scheduler`` or the address of a worker.
    host
        Tells machines apart.
    versions, wire
        Of packages, and of the code that talks between processes.
    instance, number, tp, pp, node, gpu
        A worker's rank, as it was started; ``instance`` is empty for one that has no name.
    role
        A head's.
    gpu_name, gpu_uuid
        Of the first GPU that a worker sees.
    error
        Why it does not say all this; empty if it does.
    is_silent
        It has not answered in time, and may yet.
    """

    who: str
    host: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    wire: str = ""
    instance: str = ""
    number: int = 0
    tp: int = 1
    pp: int = 1
    node: int | None = None
    gpu: int | None = None
    role: Role | None = None
    gpu_name: str = ""
    gpu_uuid: str = ""
    error: str = ""
    is_silent: bool = False

    @property
    def rank(self) -> str:
        """For people."""
        return f"rank {self.number} of {self.instance} ({self.who})"


def look() -> dict[str, Any]:
    """The fields of `Presence` that every process has."""
    return {
        "host": settings().rank.host or socket.gethostname(),
        "versions": versions(),
        "wire": wire_digest(),
    }


def look_at_worker(dask_worker: Worker) -> dict[str, Any]:
    """All fields of `Presence`, on a worker; Dask fills in the parameter."""
    place = settings().rank
    seen = visible_gpus(gpus()) if "CUDA_VISIBLE_DEVICES" in os.environ else []
    role = role_of(dask_worker.state.total_resources)
    return look() | {
        "instance": place.instance or "",
        "number": place.number,
        "tp": place.tensor_parallel,
        "pp": place.pipeline_parallel,
        "node": place.node,
        "gpu": place.gpu,
        "role": role.value if role else None,
        "gpu_name": seen[0].name if seen else "",
        "gpu_uuid": seen[0].uuid if seen else "",
    }


async def presences(client: Client, workers: Iterable[str]) -> list[Presence]:
    """What the given workers say; one that does not answer in time is there with its error."""
    addresses = list(workers)
    if not addresses:
        return []
    try:
        async with asyncio.timeout(_ASK_TIMEOUT_S):
            answers = await client.run(look_at_worker, workers=addresses, on_error="return")
    except TimeoutError:
        text = f"it does not answer within {_ASK_TIMEOUT_S:g} s"
        return [Presence(address, error=text, is_silent=True) for address in addresses]
    return [presence_of(address, answers.get(address)) for address in addresses]


async def scheduler_presence(client: Client) -> Presence:
    try:
        async with asyncio.timeout(_ASK_TIMEOUT_S):
            return presence_of("scheduler", await client.run_on_scheduler(look))
    except TimeoutError:
        return Presence("scheduler", error=f"it does not answer within {_ASK_TIMEOUT_S:g} s")
    except Exception as error:  # whatever another version, or none, leads to over there
        return presence_of("scheduler", error)


def client_presence() -> Presence:
    return presence_of("client", look())


def presence_of(who: str, answer: Any) -> Presence:
    """From what was given, or raised, over there."""
    if isinstance(answer, dict):
        try:
            role = answer.get("role")
            return Presence(who, **{**answer, "role": Role(role) if role else None})
        except (TypeError, ValueError) as error:
            return Presence(who, error=f"another version of daskserve is there ({error})")
    if answer is None:
        return Presence(who, error="it has left")
    reason = f"{type(answer).__name__}: {answer}"
    return Presence(who, error=f"daskserve is not installed there, or another version ({reason})")

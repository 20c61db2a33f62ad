"""Names that the client, the scheduler and the workers must agree on."""

from __future__ import annotations

from typing import NamedTuple

from daskserve.core.instance import Role

DISPATCH_PLUGIN = "daskserve-dispatch"
INSTANCE_PLUGIN = "daskserve-instance"

ANNOTATION = "daskserve"
"""Task annotation with what dispatch must know of a request, see `Facts`."""

# Scheduler handlers, called by clients and workers.
STATUS = "daskserve_status"
CLOCK = "daskserve_clock"
ATTACH = "daskserve_attach"
DETACH = "daskserve_detach"

DRAIN = "daskserve_drain"
FLIP = "daskserve_flip"
RESUME = "daskserve_resume"
OBSERVE = "daskserve_observe"
NOTE_JOB = "daskserve_note_job"
NOTE_DASHBOARD = "daskserve_note_dashboard"
NOTE_DECISION = "daskserve_note_decision"

OPEN_GROUP = "daskserve_open_group"
FIND_GROUP = "daskserve_find_group"

# Scheduler and worker handlers that open a `Link` for the online requests of a service.
ONLINE = "daskserve_online"

# Messages on the stream from a worker to the scheduler.
REPORT = "daskserve-report"
FIGURES = "daskserve-figures"

# Messages on the stream from the scheduler to a worker.
FREE_KV = "daskserve-free-kv"
KEEP_KV = "daskserve-keep-kv"

# Worker handlers.
BECOME = "daskserve_become"
LEAVE = "daskserve_leave"
LOAD = "daskserve_load"
KV_PULLED = "daskserve_kv_pulled"
PIN_KV = "daskserve_pin_kv"
PULL_KV = "daskserve_pull_kv"
RELEASE_KV = "daskserve_release_kv"

_PREFILL, _DECODE = "prefill-", "decode-"


def prefill_key(request_id: str) -> str:
    return _PREFILL + request_id


def decode_key(request_id: str) -> str:
    """Key of the task whose result is the completion, on a colocated instance too."""
    return _DECODE + request_id


def request_id_of(key: object) -> str | None:
    """The request that a task key belongs to; None for other people's keys."""
    if isinstance(key, str):
        for prefix in (_PREFILL, _DECODE):
            if key.startswith(prefix):
                return key[len(prefix) :]
    return None


def run_name(request_id: str, run: int) -> str:
    """Id that instances know a request by: another one each time it starts anew, so that
    whatever is late of an earlier run is nobody's."""
    return f"{request_id}.{run}" if run else request_id


def request_of_run(run_id: str) -> str:
    return run_id.partition(".")[0]


def roles_of(resources: dict[str, float] | None) -> tuple[Role, ...]:
    """Every role that a worker with these Dask resources can have: those with a whole unit.

    It starts with the one that is named first, and may flip to the others.
    """
    names = [role.value for role in Role]
    given = resources or {}
    return tuple(Role(name) for name in given if name in names and given[name] >= 1)


def role_of(resources: dict[str, float] | None) -> Role | None:
    """The role of a task with these Dask resources, or the first role of a worker."""
    return next(iter(roles_of(resources)), None)


class Facts(NamedTuple):
    """What dispatch must know of a request. A plain tuple for any serializer.

    ``position`` is the place in its graph: Dask itself runs the tasks of a graph in an order of
    its own.
    """

    prompt_tokens: int
    max_tokens: int
    position: int

    def pool_tokens(self, role: Role) -> int:
        """Most tokens whose KV an instance of this role must hold.

        The last output token is never fed back, so its KV is never needed.
        """
        return self.prompt_tokens + (0 if role is Role.PREFILL else self.max_tokens - 1)

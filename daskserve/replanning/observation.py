"""What the replanner sees of the instances at one moment."""

from __future__ import annotations

from dataclasses import dataclass

from daskserve.core.instance import Role
from daskserve.core.placement import Parallelism
from daskserve.replanning.split import Split


@dataclass(frozen=True, slots=True)
class InstanceView:
    """One instance that is ready.

    Parameters
    ----------
    num_running
        Requests bound to it.
    can_flip
        Whether it could take the other role.
    """

    address: str
    role: Role
    num_running: int = 0
    can_flip: bool = True
    shape: Parallelism = Parallelism()


@dataclass(frozen=True, slots=True)
class RoleLoad:
    """The queue of one role.

    Parameters
    ----------
    num_waiting
        Requests that no instance of the role has room for.
    num_running
        Requests bound to its instances; for prefill those that queue there too.
    num_slots
        Requests that its instances can have at once.
    """

    num_waiting: int = 0
    num_running: int = 0
    num_slots: int = 0


@dataclass(frozen=True, slots=True)
class Observation:
    """All of it.

    Parameters
    ----------
    instances
        PREFILL and DECODE ones.
    prefill, decode
        Their queues.
    is_busy
        An earlier change is still under way, or an instance is draining or loading.
    can_add
        Instances that could be started; with 0, ``why_not_add`` says why.
    can_remove
        Whether instances may be stopped.
    """

    instances: tuple[InstanceView, ...]
    prefill: RoleLoad = RoleLoad()
    decode: RoleLoad = RoleLoad()
    is_busy: bool = False
    can_add: int = 0
    why_not_add: str = "this cluster cannot add instances"
    can_remove: bool = False

    def of_role(self, role: Role) -> list[InstanceView]:
        return [instance for instance in self.instances if instance.role is role]

    @property
    def split(self) -> Split | None:
        """None while a role has no instance, or shapes differ."""
        shapes = {instance.shape for instance in self.instances}
        num_prefill, num_decode = len(self.of_role(Role.PREFILL)), len(self.of_role(Role.DECODE))
        if len(shapes) != 1 or not num_prefill or not num_decode:
            return None
        return Split(num_prefill, num_decode, shapes.pop())

    def load(self, role: Role) -> RoleLoad:
        return self.prefill if role is Role.PREFILL else self.decode

    def idlest(self, role: Role) -> list[InstanceView]:
        """Those of a role that could flip, the quickest to drain first."""
        found = [instance for instance in self.of_role(role) if instance.can_flip]
        return sorted(found, key=lambda instance: (instance.num_running, instance.address))

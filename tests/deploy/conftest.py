from __future__ import annotations

from collections.abc import Callable

import pytest

from daskserve.core.instance import Role
from daskserve.core.placement import GPULocation, InstancePlacement, Parallelism, Placement
from daskserve.deploy.site import Site
from daskserve.deploy.targets import Deployment, deploy


def gpus(*places: tuple[int, int]) -> tuple[GPULocation, ...]:
    return tuple(GPULocation(*place) for place in places)


@pytest.fixture(scope="session")
def placement() -> Placement:
    """A prefill instance on node 0, a decode instance over nodes 0 and 1, one on node 1."""
    return Placement(
        (
            InstancePlacement(Role.PREFILL, Parallelism(2, 1), gpus((0, 0), (0, 1)), "H100"),
            InstancePlacement(
                Role.DECODE, Parallelism(1, 2), gpus((0, 2), (1, 0)), "H100", max_batch_size=16
            ),
            InstancePlacement(Role.DECODE, Parallelism(1, 1), gpus((1, 3)), "H100"),
        ),
        gpus_per_node=4,
    )


@pytest.fixture
def rendered(placement) -> Callable[..., Deployment]:
    """``rendered("slurm", hosts=("a", "b"))``"""

    def render(target: str, **site) -> Deployment:
        return deploy(placement, Site(**site), target, "/shared/job")

    return render

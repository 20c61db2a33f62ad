"""Instances that are started and stopped while the service works."""

from __future__ import annotations

import pytest
from distributed import Client, Worker

from daskserve import SamplingParams, Service
from daskserve.core.instance import Role
from daskserve.core.placement import Parallelism
from daskserve.errors import ClusterError
from daskserve.service.growing import LocalInstances

PARAMS = SamplingParams(max_tokens=30, ignore_eos=True)
SLOTS = 8


def spec_of(name: str, role: Role, shape: Parallelism) -> dict:
    options = {
        "host": "127.0.0.1",
        "dashboard": False,
        "dashboard_address": "127.0.0.1:0",
        "nthreads": SLOTS,
        "resources": {role.value: SLOTS},
        "memory_limit": 0,
    }
    return {name: {"cls": Worker, "options": options}}


def roles(service: Service) -> list[Role]:
    return sorted(instance.role for instance in service.info())


def test_one_is_added_and_another_drained_and_stopped_under_load(cluster, mock):
    with (
        cluster(SLOTS, prefill=1, decode=1) as workers,
        Client(workers) as client,
        Service.attach(client, mock(num_kv_blocks=400)) as service,
    ):
        connection = service._connection
        instances = LocalInstances(
            workers, spec_of, connection.observe, connection.drain, most=3, start_timeout_s=60
        )
        assert instances.room(2) == 1 and instances.room(3) == 0
        old = next(i.address for i in service.info() if i.role is Role.DECODE)
        futures = service.map(["before it is added"] * 10, PARAMS)
        client.sync(instances.add, Role.DECODE, Parallelism())
        assert roles(service) == [Role.DECODE, Role.DECODE, Role.PREFILL]
        futures += service.map(["before the other is stopped"] * 10, PARAMS)
        client.sync(instances.remove, old)
        assert roles(service) == [Role.DECODE, Role.PREFILL]
        assert old not in [i.address for i in service.info()]
        futures += service.map(["after it"] * 10, PARAMS)
        assert all(len(c.token_ids) == 30 for c in client.gather(futures))
        with pytest.raises(ClusterError, match="no instance at"):
            client.sync(instances.remove, old)

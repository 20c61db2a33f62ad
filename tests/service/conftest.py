"""Clusters for service tests: real schedulers and workers on loopback, the mock model on them.

Most tests share one cluster whose workers are threads of this process: that starts in a second.
Tests that kill a worker take processes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import dask
import pytest
from distributed import Client, Scheduler, Security, SpecCluster, Worker

from daskserve import EngineConfig, Service
from daskserve.config import settings
from daskserve.core.instance import Role

LOOPBACK = {
    "host": "127.0.0.1",
    "protocol": settings().service.protocol,
    "dashboard": False,
    "dashboard_address": "127.0.0.1:0",
}


def mock_config(**changes) -> EngineConfig:
    return EngineConfig(
        **{"model": "mock", "mock_prefill_s": 0.002, "mock_decode_s": 0.002, **changes}
    )


def spec_cluster(slots: int = 16, security: Security | None = None, **counts: int) -> SpecCluster:
    """Workers with role resources as threads of this process: ``spec_cluster(prefill=1)``."""
    common = dict(LOOPBACK)
    if security is not None:
        common |= {"security": security, "protocol": "tls://"}
    workers = {}
    for role in Role:
        for index in range(counts.get(role.value.lower(), 0)):
            options = {"nthreads": slots, "resources": {role.value: slots}, "memory_limit": 0}
            workers[f"{role.value}-{index}"] = {"cls": Worker, "options": {**common, **options}}
    return SpecCluster(
        workers=workers,
        scheduler={"cls": Scheduler, "options": {**common, "port": 0}},
        security=security,
        silence_logs=50,
    )


@contextmanager
def attached(config: EngineConfig, slots: int = 16, **counts: int) -> Iterator[Service]:
    """A service on a scheduler that it did not start."""
    with (
        dask.config.set({"daskserve.service.check-dispatch": True}),
        spec_cluster(slots, **counts) as cluster,
        Client(cluster) as client,
        Service.attach(client, config) as service,
    ):
        yield service


@pytest.fixture(scope="session")
def service() -> Iterator[Service]:
    """One prefill and two decode instances, checked dispatch."""
    with attached(mock_config(num_kv_blocks=200), prefill=1, decode=2) as service:
        yield service


@pytest.fixture(scope="session")
def colocated() -> Iterator[Service]:
    """The same model on one colocated instance: the answers to compare with."""
    with attached(mock_config(num_kv_blocks=200), colocated=1) as service:
        yield service


@pytest.fixture(scope="session")
def eventually() -> Callable[..., None]:
    """Wait until a condition holds."""

    def wait(condition: Callable[[], bool], timeout_s: float = 2.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, "it did not happen in time"
            time.sleep(0.01)

    return wait


@pytest.fixture(scope="session")
def is_idle() -> Callable[[Service], bool]:
    """Every block free on every instance, nothing queued, held or running anywhere."""

    def check(service: Service) -> bool:
        counters = service.load().values()
        dispatch = service.status()["dispatch"]
        is_empty = all(
            c.used_kv_blocks == c.num_waiting == c.num_running == c.num_holding == 0
            for c in counters
        )
        nothing_waits = not any(dispatch["waiting"].values())
        return is_empty and nothing_waits and dispatch["running"] == dispatch["holding"] == 0

    return check


@pytest.fixture(scope="session")
def attach() -> Callable[..., AbstractContextManager[Service]]:
    """Start workers and attach a service: ``with attach(config, prefill=1, decode=1) as s``."""
    return attached


@pytest.fixture(scope="session")
def cluster() -> Callable[..., SpecCluster]:
    """Start workers with roles: ``with cluster(prefill=1) as c``."""
    return spec_cluster


@pytest.fixture(scope="session")
def mock() -> Callable[..., EngineConfig]:
    """A mock engine's configuration, quick steps, with changes."""
    return mock_config

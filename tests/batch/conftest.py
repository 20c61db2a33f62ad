from __future__ import annotations

from contextlib import contextmanager

import pytest
from distributed import Client, Scheduler, SpecCluster, Worker

from daskserve import EngineConfig, Service
from daskserve.config import settings

CONFIG = EngineConfig(model="mock")
LOOPBACK = {
    "host": "127.0.0.1",
    "protocol": settings().service.protocol,
    "dashboard": False,
    "dashboard_address": "127.0.0.1:0",
}


def worker(role):
    options = {"nthreads": 64, "resources": {role: 64}, "memory_limit": 0}
    return {"cls": Worker, "options": {**LOOPBACK, **options}}


@contextmanager
def thread_cluster():
    """One prefill and one decode worker as threads of this process: quick to start."""
    with SpecCluster(
        workers={"prefill": worker("PREFILL"), "decode": worker("DECODE")},
        scheduler={"cls": Scheduler, "options": {**LOOPBACK, "port": 0}},
        silence_logs=50,
    ) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def service():
    """A service that tests share."""
    with (
        thread_cluster() as cluster,
        Client(cluster) as client,
        Service.attach(client, CONFIG) as service,
    ):
        yield service


@pytest.fixture
def cluster():
    """A cluster of its own for a test that breaks it."""
    with thread_cluster() as cluster:
        yield cluster


@pytest.fixture
def local_service():
    """The same in processes of their own, which a test may kill."""
    with Service.local(prefill=1, decode=1, config=CONFIG) as service:
        yield service

"""Real servers on loopback over real schedulers and workers, which are threads of this process."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import openai
import pytest
import uvicorn
from distributed import Client, Scheduler, SpecCluster, Worker
from starlette.routing import Route

from daskserve import SLO, EngineConfig, Service
from daskserve.config import ServeSettings, settings
from daskserve.server.app import ServerOptions
from daskserve.server.keys import KeyRing
from daskserve.server.run import Address, listen
from daskserve.server.run import serve as serve_until_stopped

LOOPBACK = {"host": "127.0.0.1", "dashboard": False, "dashboard_address": "127.0.0.1:0"}
SLOTS = 16
WORKER = {**LOOPBACK, "nthreads": SLOTS, "memory_limit": 0}


def mock_config(**changes: Any) -> EngineConfig:
    common = {"model": "mock", "mock_prefill_s": 0.002, "mock_decode_s": 0.002}
    return EngineConfig(**{**common, "num_kv_blocks": 400, "max_batch_size": SLOTS, **changes})


@contextmanager
def thread_cluster(**counts: int) -> Iterator[SpecCluster]:
    """Workers with role resources: ``thread_cluster(PREFILL=1, DECODE=1)``."""
    workers = {
        f"{role}-{index}": {
            "cls": Worker,
            "options": {**WORKER, "resources": {role: SLOTS}},
        }
        for role, count in counts.items()
        for index in range(count)
    }
    scheduler = {"cls": Scheduler, "options": {**LOOPBACK, "port": 0}}
    with SpecCluster(workers=workers, scheduler=scheduler, silence_logs=50) as cluster:
        yield cluster


@dataclass
class Server:
    """A running server: where it listens, and a second service to look at its instances."""

    url: str
    routes: list[Route]
    config: EngineConfig
    probe: Service
    scheduler: str
    clients: list[openai.OpenAI] = field(default_factory=list)

    def client(self, **options: Any) -> openai.OpenAI:
        """Closed with the server."""
        given = {"api_key": "none", "max_retries": 0, "timeout": 60, **options}
        self.clients.append(openai.OpenAI(base_url=f"{self.url}/v1", **given))
        return self.clients[-1]

    def close(self) -> None:
        for client in self.clients:
            client.close()

    def http(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=60, **options)

    def is_idle(self) -> bool:
        """Every block free on every instance, nothing queued, held or running."""
        counters = self.probe.load().values()
        dispatch = self.probe.status()["dispatch"]
        is_empty = all(
            c.used_kv_blocks == c.num_waiting == c.num_running == c.num_holding == 0
            for c in counters
        )
        nothing_waits = not any(dispatch["waiting"].values())
        return is_empty and nothing_waits and dispatch["running"] == dispatch["holding"] == 0


@contextmanager
def serving(
    scheduler: str,
    config: EngineConfig,
    limits: ServeSettings | None = None,
    slo: SLO | None = None,
    tls: dict[str, str] | None = None,
    keys: tuple[str, ...] = (),
    **given: Any,
) -> Iterator[tuple[str, list[Route]]]:
    """A server in a thread with a loop of its own; its URL and routes."""
    options = ServerOptions(config.model, limits or settings().serve, keys=KeyRing(keys), **given)
    service = Service.attach(scheduler, config, slo=slo, asynchronous=True)
    listener = listen("127.0.0.1", 0)
    url = f"{'https' if tls else 'http'}://127.0.0.1:{listener.getsockname()[1]}"
    servers: list[uvicorn.Server] = []
    address = Address(**(tls or {}))
    main = serve_until_stopped(service, options, listener, address, servers.append)
    thread = threading.Thread(target=asyncio.run, args=(main,))
    thread.start()
    try:
        headers = {"authorization": f"Bearer {keys[0]}"} if keys else {}
        wait_until(lambda: is_open(url, headers) or not thread.is_alive(), 60)
        yield url, servers[0].config.app.routes
    finally:
        servers[0].should_exit = True
        thread.join(30)
        assert not thread.is_alive()


def is_open(url: str, headers: dict[str, str]) -> bool:
    """Requests are let in: an empty one is judged."""
    try:
        with httpx.Client(verify=False, headers=headers) as http:
            return http.post(f"{url}/v1/completions", json={}).status_code != 503
    except httpx.TransportError:
        return False


def wait_until(condition: Callable[[], bool], timeout_s: float = 2.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


@contextmanager
def served(config: EngineConfig, counts: Any = None, **given: Any) -> Iterator[Server]:
    with (
        thread_cluster(**(counts or {"PREFILL": 1, "DECODE": 1})) as cluster,
        Client(cluster, set_as_default=False) as client,
        Service.attach(client, config) as probe,
        serving(cluster.scheduler_address, config, **given) as (url, routes),
    ):
        with closing(Server(url, routes, config, probe, cluster.scheduler_address)) as server:
            yield server


@contextmanager
def served_alongside(other: Server, **given: Any) -> Iterator[Server]:
    with serving(other.scheduler, other.config, **given) as (url, routes):
        with closing(Server(url, routes, other.config, other.probe, other.scheduler)) as server:
            yield server


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """The mock model, quick steps, on one prefill and one decode instance."""
    with served(mock_config()) as server:
        yield server


@pytest.fixture(scope="session")
def llama() -> Iterator[Server]:
    """A small random model, in float32."""
    config = EngineConfig(model="tiny-random-llama", dtype="float32", num_kv_blocks=400)
    with served(config, counts={"COLOCATED": 1}) as server:
        yield server


@pytest.fixture(scope="session")
def eventually() -> Callable[..., None]:
    return wait_until


@pytest.fixture(scope="session")
def serve() -> Callable[..., Any]:
    """Start a cluster and a server: ``with serve(mock(), limits=...) as server``."""
    return served


@pytest.fixture(scope="session")
def alongside() -> Callable[..., Any]:
    """Start one more server on a server's scheduler: ``with alongside(server, limits=...)``."""
    return served_alongside


@pytest.fixture
def lone() -> Callable[..., Any]:
    """A cluster that a test may break, and a server on it: ``with lone() as (cluster, url)``."""

    @contextmanager
    def start() -> Iterator[tuple[SpecCluster, str]]:
        with thread_cluster(PREFILL=1, DECODE=1) as cluster:
            with serving(cluster.scheduler_address, mock_config()) as (url, _):
                yield cluster, url

    return start


@pytest.fixture(scope="session")
def mock() -> Callable[..., EngineConfig]:
    return mock_config


@pytest.fixture(scope="session")
def limits() -> Callable[..., ServeSettings]:
    """The settings with changes: ``limits(max_in_flight=2)``."""
    return lambda **changes: settings().serve.model_copy(update=changes)

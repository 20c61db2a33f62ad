"""KV from a prefill to a decode worker, against a bare Dask worker RPC moving the same bytes.

Two worker processes on one core each. One holds KV pages of SmolLM2-135M in a real pool, the
other pulls them into its own pool, alternating in one run:

- `bare rpc`: a worker handler that returns one array, `worker.rpc(address).handler()`;
- `pull`: the product's pull into scattered pages of the pool, digest not checked;
- `verified`: the same with the digest of every page checked, as in production;
- `socket`: `sock_recv_into` a buffer that exists, for orientation.

The last line is a JSON list of {"name", "value", "unit", "target", "ok"}.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import time
from statistics import median

import numpy as np
from distributed import Client, Nanny, Scheduler, SpecCluster, Worker
from distributed.diagnostics.plugin import WorkerPlugin
from distributed.protocol import to_serialize

from daskserve.config import settings
from daskserve.core.kv import KVHandle
from daskserve.service.kv_pull import OPERATION, KVServer, pull
from daskserve.service.local import CoreAffinity

MIB = 2**20
SIZES_MIB = (6, 64, 512)
TARGET = 0.9
WAYS = ("bare rpc", "pull", "verified", "socket")


class Rig(WorkerPlugin):
    """A KV pool full of noise on every worker, and the ways to move it."""

    name = "rig"

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes

    def setup(self, worker: Worker) -> None:
        import torch

        from daskserve.workers.forward import ModelShape
        from daskserve.workers.kv_pool import KVPool, page_bytes

        shape = ModelShape(30, 3, 64, 49152, 8192, frozenset())  # SmolLM2-135M
        self.page_bytes = page_bytes(shape, torch.bfloat16, 16)
        num_blocks = self._max_bytes // self.page_bytes + 64
        self.pool = KVPool(shape, torch.bfloat16, num_blocks, 16)
        raw = self.pool.pages.view(torch.uint8).numpy()
        raw[:] = np.random.default_rng(os.getpid()).integers(0, 256, raw.shape, dtype=np.uint8)
        self.flat = raw.reshape(-1)
        self.worker = worker
        stall_s = settings().service.pull_stall_timeout_s
        server = KVServer(worker.address, self.export, lambda *released: None, stall_s)
        worker.handlers[OPERATION] = server.handle
        worker.handlers["bare"] = self.bare

    def pages(self, num_pages: int) -> list[int]:
        """Runs of 32 consecutive pages, as a pool in use gives them: 512 tokens each."""
        runs = [range(first, first + 32) for first in range(1, self.pool.num_blocks - 31, 32)]
        return [page for run in runs for page in run][:num_pages]

    def export(self, handle: KVHandle) -> list[memoryview]:
        return self.pool.page_views(self.pages(handle.num_tokens))

    def handle(self, num_pages: int) -> KVHandle:
        from daskserve.workers.kv_digest import kv_digest

        digest = kv_digest(self.pool, self.pages(num_pages))
        return KVHandle("1", self.worker.address, b"s" * 16, num_pages, "layout", digest)

    async def bare(self, num_bytes: int) -> dict:
        return {"data": to_serialize(self.flat[:num_bytes])}


def make_handle(num_pages: int, dask_worker: Worker) -> KVHandle:
    return dask_worker.plugins["rig"].handle(num_pages)


async def move(way: str, handle: KVHandle, dask_worker: Worker) -> float:
    """Seconds to move the pages of ``handle`` to this worker."""
    from daskserve.workers.pulling import Destination, pull_verified

    rig: Rig = dask_worker.plugins["rig"]
    pages = tuple(rig.pages(handle.num_tokens))
    num_bytes = handle.num_tokens * rig.page_bytes

    destination = Destination(1, pages, rig.pool)

    async def pull_pages(handle: KVHandle, to: Destination) -> None:
        await pull(dask_worker.rpc, handle, to.views, connect_timeout_s=5, stall_timeout_s=5)

    started_at = time.perf_counter()
    if way == "bare rpc":
        answer = await dask_worker.rpc(handle.instance_address).bare(num_bytes=num_bytes)
        assert len(answer["data"]) == num_bytes
    elif way == "pull":
        await pull_pages(handle, destination)
    else:
        await pull_verified(destination, handle, pull_pages, timeout_s=30)
    return time.perf_counter() - started_at


async def serve_socket(num_bytes: int, dask_worker: Worker) -> int:
    """Listen for one plain connection and send ``num_bytes`` down it; returns the port."""
    rig: Rig = dask_worker.plugins["rig"]
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setblocking(False)

    async def serve() -> None:
        loop = asyncio.get_running_loop()
        connection, _ = await loop.sock_accept(listener)
        with listener, connection:
            await loop.sock_recv(connection, 1)
            await loop.sock_sendall(connection, memoryview(rig.flat[:num_bytes]))
            await loop.sock_recv(connection, 1)

    rig.serving = asyncio.create_task(serve())
    return listener.getsockname()[1]


async def read_socket(port: int, num_bytes: int, dask_worker: Worker) -> float:
    loop = asyncio.get_running_loop()
    rig: Rig = dask_worker.plugins["rig"]
    with socket.socket() as connection:
        connection.setblocking(False)
        await loop.sock_connect(connection, ("127.0.0.1", port))
        started_at = time.perf_counter()
        await loop.sock_sendall(connection, b".")
        rest = memoryview(rig.flat[:num_bytes])
        while rest:
            rest = rest[await loop.sock_recv_into(connection, rest) :]
        return time.perf_counter() - started_at


def measure(client: Client, size_mib: int, repeats: int) -> dict[str, float]:
    """Median seconds by way, the ways taking turns."""
    holder, puller = client.scheduler_info()["workers"]
    page_bytes = client.run(lambda dask_worker: dask_worker.plugins["rig"].page_bytes)[holder]
    num_pages = -(-size_mib * MIB // page_bytes)
    num_bytes = num_pages * page_bytes
    handle = client.run(make_handle, num_pages=num_pages, workers=[holder])[holder]
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(repeats + 1):
        for way in WAYS:
            if way == "socket":
                port = client.run(serve_socket, num_bytes=num_bytes, workers=[holder])[holder]
                job = {"function": read_socket, "port": port, "num_bytes": num_bytes}
            else:
                job = {"function": move, "way": way, "handle": handle}
            times[way].append(client.run(**job, workers=[puller])[puller])
    return {way: median(t[1:]) for way, t in times.items()}  # the first round warms up


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer repeats, < 60 s")
    quick = parser.parse_args().quick
    cores = sorted(os.sched_getaffinity(0))
    common = {"host": "127.0.0.1", "dashboard": False, "dashboard_address": "127.0.0.1:0"}
    workers = {
        i: {
            "cls": Nanny,
            "options": {
                **common,
                "nthreads": 1,
                "memory_limit": 0,
                "silence_logs": 40,
                "plugins": (CoreAffinity([cores[i % len(cores)]]),),
            },
        }
        for i in range(2)
    }
    figures = []
    with (
        SpecCluster(
            workers=workers,
            scheduler={"cls": Scheduler, "options": {**common, "port": 0}},
            silence_logs=40,
        ) as cluster,
        Client(cluster) as client,
    ):
        client.register_plugin(Rig(max(SIZES_MIB) * MIB))
        print(
            f"{'MiB':>5}"
            + "".join(f"{way:>12}" for way in WAYS)
            + "   GB/s; pull/bare verified/bare"
        )
        for size_mib in SIZES_MIB:
            repeats = {6: 41, 64: 15, 512: 5}[size_mib] // (2 if quick else 1)
            seconds = measure(client, size_mib, repeats)
            speeds = {way: size_mib * MIB / s / 1e9 for way, s in seconds.items()}
            ratio = speeds["pull"] / speeds["bare rpc"]
            verified = speeds["verified"] / speeds["bare rpc"]
            cells = "".join(f"{speeds[way]:12.2f}" for way in WAYS)
            print(f"{size_mib:5d}{cells}   {ratio:14.2f} {verified:13.2f}")
            for name, value in (
                (f"kv_pull_{size_mib}mib", ratio),
                (f"kv_pull_verified_{size_mib}mib", verified),
            ):
                figures.append(
                    {
                        "name": name,
                        "value": round(value, 3),
                        "unit": "x bare rpc",
                        "target": TARGET,
                        "ok": value >= TARGET,
                    }
                )
    print(json.dumps(figures))


if __name__ == "__main__":
    main()

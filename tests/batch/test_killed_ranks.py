"""Jobs on instances of four ranks each, of which one dies or hangs: no row is lost or repeated.

With a second decode instance the requests go on there; without one, once the group has come
together again.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import cloudpickle
import dask
import pytest
from distributed import Client
from distributed.diagnostics.plugin import WorkerPlugin
from distributed.utils import get_mp_context

from daskserve import EngineConfig, SamplingParams, Service, run_batch
from daskserve.core.placement import Parallelism

from .conftest import thread_cluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

# Workers cannot import this module.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

RANK_TIMEOUT_S = 10
CONFIG = EngineConfig(
    model="tiny-random-llama",
    dtype="float32",
    num_kv_blocks=400,
    max_batch_size=8,
    num_threads=1,
    rank_timeout_s=RANK_TIMEOUT_S,
)
PARAMS = SamplingParams(max_tokens=40, ignore_eos=True)
NUM_ROWS = 40
PROMPTS = [f"row number {i} " * (1 + i % 9) for i in range(NUM_ROWS)]
ROWS = [{"custom_id": f"id-{i}", "prompt": prompt} for i, prompt in enumerate(PROMPTS)]
FOUR = Parallelism(2, 2)
DECODE = {"elsewhere": [FOUR, Parallelism()], "here again": [FOUR]}
RANKS = [f"{instance}{rank}" for instance in ("prefill-0", "decode-1") for rank in ("", ".1", ".3")]


class DieHalfWay(WorkerPlugin):
    """Kills a rank, once, when half of its first piece of KV has gone over the connection."""

    name = "die-half-way"

    def __init__(self, rank: str, once: Path) -> None:
        self.rank, self.once = rank, once

    def setup(self, worker) -> None:
        from daskserve.service import kv_pull

        if worker.name != self.rank or not self.once.exists():
            return
        pieces = kv_pull._pieces

        def cut(views):
            for piece in pieces(views):
                yield piece[: piece.nbytes // 2]
                self.once.unlink()
                os.kill(os.getpid(), signal.SIGKILL)

        kv_pull._pieces = cut


@pytest.fixture(scope="module")
def expected(tmp_path_factory) -> list[str]:
    """The lines that instances of one rank write when nothing happens to them."""
    output = tmp_path_factory.mktemp("undisturbed") / "out.jsonl"
    with (
        thread_cluster() as cluster,
        Client(cluster) as client,
        Service.attach(client, CONFIG) as service,
    ):
        run_batch(service, ROWS, output, params=PARAMS, show_progress=False)
    return sorted(output.read_text().splitlines())


@pytest.fixture(scope="module", params=DECODE)
def service(request) -> Iterator[Service]:
    """Ranks are forked from a process that has imported torch, since they start so often here."""
    with dask.config.set({"distributed.worker.multiprocessing-method": "forkserver"}):
        get_mp_context().set_forkserver_preload(["daskserve.workers.parallel.start"])
        with Service.local(
            prefill=[FOUR], decode=DECODE[request.param], config=CONFIG, cores=None
        ) as service:
            yield service


def pid_of(service: Service, rank: str) -> int:
    workers = service.client.scheduler_info(n_workers=-1)["workers"]
    [address] = [address for address, worker in workers.items() if worker["name"] == rank]
    [pid] = service.client.run(os.getpid, workers=[address]).values()
    return pid


def begin(service: Service, output: Path, pool: ThreadPoolExecutor, num_lines: int) -> Future:
    """A job under way, with so many rows written."""
    job = pool.submit(run_batch, service, ROWS, output, params=PARAMS, show_progress=False)
    deadline = time.monotonic() + 120
    while not output.exists() or output.read_bytes().count(b"\n") < num_lines:
        assert time.monotonic() < deadline and not job.done()
        time.sleep(0.005)
    return job


def check(service: Service, output: Path, job: Future, expected: list[str], rank: str) -> None:
    """All rows are there once, and the reason of the loss names the rank."""
    summary = job.result(timeout=240)
    lines = output.read_text().splitlines()
    ids = [json.loads(line)["custom_id"] for line in lines]
    assert (len(ids), len(set(ids)), summary.num_failed) == (NUM_ROWS, NUM_ROWS, 0)
    assert sorted(lines) == expected
    losses = service.status()["losses"]
    assert f"rank {rank.partition('.')[2] or 0}" in losses[-1]["reason"], losses
    assert losses[-1]["role"].lower() == rank.partition("-")[0]


@pytest.fixture(autouse=True)
def whole_again(service: Service) -> Iterator[None]:
    """After every test all instances get ready again, and nothing is left in them."""
    num_instances, num_ranks = len(service.load()), num_workers(service)
    yield
    deadline = time.monotonic() + 200
    while True:
        loads = service.load().values()
        is_whole = len(loads) == num_instances and num_workers(service) == num_ranks
        if is_whole and not any(load.used_kv_blocks or load.num_running for load in loads):
            return
        assert time.monotonic() < deadline, service.status()
        time.sleep(0.2)


def num_workers(service: Service) -> int:
    return len(service.client.scheduler_info(n_workers=-1)["workers"])


@pytest.mark.parametrize("rank", RANKS)
def test_a_killed_rank_loses_no_row(service, tmp_path, expected, rank):
    with ThreadPoolExecutor(1) as pool:
        job = begin(service, tmp_path / "out.jsonl", pool, 4)
        os.kill(pid_of(service, rank), signal.SIGKILL)
        check(service, tmp_path / "out.jsonl", job, expected, rank)


@pytest.mark.parametrize("rank", RANKS)
def test_a_rank_that_dies_in_a_pull_loses_no_row(service, tmp_path, expected, rank):
    once = tmp_path / "once"
    once.touch()
    service.client.register_plugin(DieHalfWay(rank, once))
    try:
        with ThreadPoolExecutor(1) as pool:
            job = begin(service, tmp_path / "out.jsonl", pool, 0)
            check(service, tmp_path / "out.jsonl", job, expected, rank)
    finally:
        service.client.unregister_worker_plugin(DieHalfWay.name)
    assert not once.exists()


@pytest.mark.parametrize("rank", ["prefill-0.3", "decode-1.1"])
def test_a_rank_that_hangs_is_noticed_in_time(service, tmp_path, expected, rank):
    num_losses = len(service.status()["losses"])
    pid = pid_of(service, rank)
    with ThreadPoolExecutor(1) as pool:
        job = begin(service, tmp_path / "out.jsonl", pool, 4)
        os.kill(pid, signal.SIGSTOP)
        stopped_at = time.monotonic()
        try:
            while len(service.status()["losses"]) == num_losses:
                assert time.monotonic() - stopped_at < RANK_TIMEOUT_S + 5
                time.sleep(0.05)
            print(f"{rank} missed after {time.monotonic() - stopped_at:.1f} s")
            check(service, tmp_path / "out.jsonl", job, expected, rank)
        finally:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass

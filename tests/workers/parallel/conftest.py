"""Instances of several ranks, each rank on a thread of this process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from daskserve.core.instance import EngineConfig, Role
from daskserve.core.placement import Parallelism
from daskserve.errors import InstanceLost
from daskserve.models import byte_tokenizer
from daskserve.models.catalog import resolve
from daskserve.text.tokenizer import Tokenizer
from daskserve.workers.cuda import reference
from daskserve.workers.cuda.attention import VarlenAttention
from daskserve.workers.engine import Engine
from daskserve.workers.kv_pool import KVPool
from daskserve.workers.loading import build_engine
from daskserve.workers.parallel import group
from daskserve.workers.parallel.computing import DeviceComputing
from daskserve.workers.parallel.follower import Follower
from daskserve.workers.parallel.group import join_group, open_group
from daskserve.workers.parallel.links import Transport
from daskserve.workers.parallel.runner import ParallelRunner
from daskserve.workers.parallel.stage import Stage
from daskserve.workers.parallel.start import RankDevice, start_rank

HOST = "127.0.0.1"


@dataclass
class Ranks:
    """A running instance: the head's runner, and followers that serve on threads."""

    config: EngineConfig
    runner: ParallelRunner
    followers: dict[int, Follower] = field(default_factory=dict)
    threads: list[threading.Thread] = field(default_factory=list)
    errors: dict[int, BaseException] = field(default_factory=dict)

    def engine(self, role: Role, **settings) -> Engine:
        tokenizer = Tokenizer.load(resolve(self.config.model))
        config = EngineConfig(
            model=self.config.model, dtype=self.config.dtype, **({"num_kv_blocks": 64} | settings)
        )
        self.head = build_engine(role, config, lambda _: (self.runner, tokenizer))
        return self.head

    def pools(self) -> list[KVPool]:
        """Of all ranks, in order."""
        return [self.head.pool, *(self.followers[r].pool for r in sorted(self.followers))]

    def close(self) -> None:
        self.runner.close()
        for thread in self.threads:
            thread.join(10)
            assert not thread.is_alive()


def launch(
    config: EngineConfig,
    shape: Parallelism,
    timeout_s: float = 60,
    role: Role = Role.COLOCATED,
    device_of: Callable[[int], RankDevice | None] = lambda rank: None,
) -> Ranks:
    meeting, store = open_group(shape, HOST, timeout_s)
    common = dict(host=HOST, address="here", load_timeout_s=timeout_s)

    def started(rank: int, store: dist.Store, **options) -> Stage:
        return start_rank(config, shape, rank, store, device=device_of(rank), **common | options)

    followers: dict[int, Follower] = {}
    errors: dict[int, BaseException] = {}

    def follow(rank: int) -> None:
        try:
            own = join_group(meeting, rank, timeout_s)
            followers[rank] = Follower(started(rank, own))
            followers[rank].serve()
        except BaseException as error:
            errors[rank] = error

    threads = [threading.Thread(target=follow, args=(r,)) for r in range(1, shape.num_gpus)]
    for thread in threads:
        thread.start()
    runner = ParallelRunner(started(0, store, role=role))
    return Ranks(config, runner, followers, threads, errors)


def stand_in(rank: int, place: str = "cpu") -> RankDevice:
    """What ranks on cards have, with plain torch for varlen_attn and gloo for NCCL."""
    cpu = torch.device("cpu")
    computing = DeviceComputing(cpu, torch.float32, VarlenAttention(reference.varlen_attn))

    def connect(store: dist.Store, rank: int, size: int) -> dist.ProcessGroup:
        return group._connect(store, rank, size, HOST, timedelta(seconds=20))

    return RankDevice(computing, Transport(cpu, place, connect))


@pytest.fixture(scope="package")
def ranks_of() -> Iterator[Callable[..., Ranks]]:
    """``ranks_of(model, tp, pp)``: loaded once per test run; closed at its end.

    With ``on_device`` they take the path of cards, on the CPU and over gloo.
    """
    running: dict[tuple, Ranks] = {}

    def get(model: str, tp: int, pp: int, number: int = 0, on_device: bool = False) -> Ranks:
        key = (model, tp, pp, number, on_device)
        if key not in running:
            config = EngineConfig(model=model, dtype="float32", num_threads=1, rank_timeout_s=60)
            options = {"device_of": stand_in} if on_device else {}
            running[key] = launch(config, Parallelism(tp, pp), **options)
        return running[key]

    yield get
    for ranks in running.values():
        try:
            ranks.close()
        except InstanceLost:
            pass


@pytest.fixture
def write_model(tmp_path: Path) -> Callable[..., Path]:
    """``write_model(model_type, settings)``: directory of a random fp32 model."""

    def write(model_type: str, settings: dict) -> Path:
        torch.manual_seed(0)
        config = AutoConfig.for_model(model_type, **settings)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 1:  # norms and biases start as ones or zeros: hide nothing
                    parameter += torch.randn_like(parameter) * 0.2
        disable_progress_bar()
        model.save_pretrained(tmp_path)
        byte_tokenizer.write(tmp_path)
        return tmp_path

    return write

"""Every prefill shape to every decode shape through the whole service: tokens and bytes, exactly.

One prefill instance and a decode instance of each shape. Every rank is a Dask worker of its own
on a real cluster, but all are threads of this process, which imports torch only once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import dask
import pytest
import torch
from distributed import Client, Scheduler, SpecCluster, Worker
from transformers import AutoConfig, AutoModelForCausalLM

from daskserve import EngineConfig, SamplingParams, Service
from daskserve.core.instance import Role
from daskserve.core.kv import blocks_for
from daskserve.core.placement import Parallelism
from daskserve.core.shards import Shard, ShardMap
from daskserve.models.catalog import resolve
from daskserve.service.kv_counters import Pulled
from daskserve.workers.parallel.balance import stage_layers

from .conftest import LOOPBACK

pytestmark = pytest.mark.timeout(900)

SMALL = [(1, 1), (2, 1), (1, 2), (2, 2)]
SMOLLM2 = [(3, 1), (1, 2), (1, 3)]
BLOCK, WORD_BYTES = 16, 4


@dataclass(frozen=True)
class KV:
    """Sizes of a model's KV in float32."""

    num_layers: int
    num_heads: int
    head_dim: int

    def num_bytes(self, num_pages: int, shard: Shard) -> int:
        """Of the layers and heads of ``shard`` in so many pages."""
        values = 2 * shard.num_layers * shard.num_heads * BLOCK * self.head_dim
        return num_pages * values * WORD_BYTES

    def map_of(self, shape: tuple[int, int], layers: tuple[int, ...]) -> ShardMap:
        sizes = (self.num_layers, self.num_heads, self.num_heads)
        return ShardMap(Parallelism(*shape), *sizes, layers)


MODELS = {
    "tiny-random-llama": KV(2, 4, 8),
    "tiny-random-opt": KV(2, 4, 16),
    "smollm2-135m": KV(30, 3, 64),
}


def generate(model: str, prompts: list[list[int]], max_tokens: int) -> list[tuple[int, ...]]:
    """What transformers makes of each prompt, alone, in this process."""
    reference = AutoModelForCausalLM.from_pretrained(resolve(model), dtype=torch.float32).eval()
    answers = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        mask, stop = torch.ones_like(ids), dict(eos_token_id=None, pad_token_id=0)
        made = reference.generate(
            ids, attention_mask=mask, max_new_tokens=max_tokens, do_sample=False, **stop
        )
        answers.append(tuple(made[0, len(prompt) :].tolist()))
    return answers


class RankWorker(Worker):
    """A worker that is a rank, though its configuration is that of the whole process."""

    def __init__(self, *args: Any, place: dict[str, Any], **kwargs: Any) -> None:
        self.place = place
        super().__init__(*args, **kwargs)

    async def plugin_add(self, plugin: Any, **kwargs: Any) -> Any:
        # The plugin reads its place before it awaits anything.
        dask.config.set({f"daskserve.rank.{key}": value for key, value in self.place.items()})
        return await super().plugin_add(plugin, **kwargs)


def rank_name(instance: str, rank: int) -> str:
    return f"{instance}.{rank}" if rank else instance


@contextmanager
def ranks_of(shapes: dict[str, tuple[int, int]]) -> Iterator[SpecCluster]:
    """Workers for the ranks of instances by name, such as ``decode-1``."""
    workers = {}
    for name, (tp, pp) in shapes.items():
        for number in range(tp * pp):
            place = {"instance": name, "number": number}
            place |= {"tensor-parallel": tp, "pipeline-parallel": pp}
            role = name.partition("-")[0].upper()
            options = LOOPBACK | {"nthreads": 16, "memory_limit": 0, "place": place}
            options["resources"] = {role: 16} if number == 0 else {}
            workers[rank_name(name, number)] = {"cls": RankWorker, "options": options}
    scheduler = {"cls": Scheduler, "options": {**LOOPBACK, "port": 0}}
    alone = {"instance": None, "number": 0, "tensor-parallel": 1, "pipeline-parallel": 1}
    with (
        dask.config.set({f"daskserve.rank.{key}": value for key, value in alone.items()}),
        SpecCluster(workers=workers, scheduler=scheduler, silence_logs=50) as cluster,
    ):
        yield cluster


def check_pulled(
    pulled: dict[str, dict[str, Pulled]],
    addresses: dict[str, str],
    model: str,
    source: tuple[int, int],
    targets: list[tuple[int, int]],
    num_pages: int,
) -> None:
    """Every decode rank got the slices that it needs, each from who has it, in one pull each."""
    kv, config = MODELS[model], AutoConfig.from_pretrained(resolve(model))
    held = kv.map_of(source, stage_layers(config, source[1], Role.PREFILL))
    seen_pages = 0
    for index, target in enumerate(targets, start=1):
        needed = kv.map_of(target, stage_layers(config, target[1], Role.DECODE))
        by_rank = [
            pulled[addresses[rank_name(f"decode-{index}", rank)]]
            for rank in range(needed.num_ranks)
        ]
        head_bytes = sum(p.num_bytes for p in by_rank[0].values())
        pages, rest = divmod(head_bytes, kv.num_bytes(1, needed.of_rank(0)))
        num_requests = {p.num_pulls for of_holder in by_rank for p in of_holder.values()}
        assert pages > 0, f"decode-{index} got no request"
        assert rest == 0, f"decode-{index} got {rest} bytes beyond {pages} pages"
        assert len(num_requests) == 1, f"unequal pulls of {target}: {by_rank}"
        for rank, of_holder in enumerate(by_rank):
            expected = {
                addresses[rank_name("prefill-0", piece.rank)]: kv.num_bytes(pages, piece.shard)
                for piece in held.pieces_for(needed.of_rank(rank))
            }
            assert {holder: p.num_bytes for holder, p in of_holder.items()} == expected
        seen_pages += pages
    assert seen_pages == num_pages
    for rank in range(held.num_ranks):
        assert pulled[addresses[rank_name("prefill-0", rank)]] == {}


def run(model: str, source: tuple[int, int], targets: list, prompts: list[list[int]]) -> None:
    config = EngineConfig(
        model=model, dtype="float32", num_kv_blocks=400, num_threads=1, rank_timeout_s=60
    )
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    expected = generate(model, prompts, params.max_tokens)
    shapes = {"prefill-0": source}
    shapes |= {f"decode-{index}": target for index, target in enumerate(targets, start=1)}
    patient = {"pull-connect-timeout-s": 60, "pull-stall-timeout-s": 60}
    with (
        dask.config.set({f"daskserve.service.{key}": value for key, value in patient.items()}),
        ranks_of(shapes) as cluster,
        Client(cluster) as client,
        Service.attach(client, config) as service,
    ):
        answers = client.gather(service.map(prompts, params))
        addresses = {name: worker.address for name, worker in cluster.workers.items()}
        pulled = service.kv_pulled()
    assert [answer.token_ids for answer in answers] == expected
    assert all(answer.timeline.num_recomputes == 0 for answer in answers)
    num_pages = sum(blocks_for(len(prompt), BLOCK) for prompt in prompts)
    check_pulled(pulled, addresses, model, source, targets, num_pages)


def test_pipeline_stages_go_on_from_tensor_parallel_ranks():
    prompts = [[(7 * n + 3 * i) % 250 + 1 for i in range(n)] for n in (1, 16, 40, 9)]
    run("tiny-random-llama", (2, 1), [(1, 2)], prompts)


@pytest.mark.slow
@pytest.mark.parametrize("source", SMALL, ids=lambda s: f"TP{s[0]}xPP{s[1]}")
@pytest.mark.parametrize("model", ["tiny-random-llama", "tiny-random-opt"])
def test_every_decode_shape_goes_on_from(model, source):
    lengths = [1, 15, 16, 17, 31, 40, 64, 100, 150, 33, 5, 80, 22, 47, 128, 3]
    prompts = [[(7 * n + 3 * i) % 250 + 1 for i in range(n)] for n in lengths]
    run(model, source, SMALL, prompts)


@pytest.mark.slow
@pytest.mark.parametrize("source", SMOLLM2, ids=lambda s: f"TP{s[0]}xPP{s[1]}")
def test_every_decode_shape_of_a_real_model_goes_on_from(source, smollm2_dir):
    prompts = [[(31 * n + 17 * i) % 40_000 + 100 for i in range(n)] for n in (3, 16, 40, 70, 25, 9)]
    run("smollm2-135m", source, SMOLLM2, prompts)

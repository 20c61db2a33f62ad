"""Ranks on cards, on the CPU: gloo instead of NCCL, plain torch instead of varlen_attn."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
import torch

from daskserve.core.instance import EngineConfig, Role
from daskserve.core.placement import Parallelism
from daskserve.errors import ConfigError, InstanceLost, ModelError
from daskserve.workers.cuda.pool import DevicePool
from daskserve.workers.forward import ForwardBatch
from daskserve.workers.parallel import group
from daskserve.workers.parallel.answers import Answering
from daskserve.workers.parallel.group import RankGroup, join_group, open_group
from daskserve.workers.parallel.stage import ROOM
from daskserve.workers.parallel.start import start_rank

from .conftest import HOST, launch, stand_in
from .test_group import on_all
from .test_kv_shapes import Resharding
from .test_tokens import SETTINGS, answers, generate

MODEL = "tiny-random-llama"


@pytest.fixture
def quick_last_words(monkeypatch):
    monkeypatch.setattr(group, "_LAST_WORDS_S", 0.4)


def linked_groups(shape: Parallelism, timeout_s: float = 5.0, places=None) -> list:
    """A group per rank, or what its constructor raised."""
    meeting, store = open_group(shape, HOST, 5)
    found: list = [None] * shape.num_gpus
    places = places or ["cpu"] * shape.num_gpus

    def join(rank: int) -> None:
        own = store if rank == 0 else join_group(meeting, rank, 5)
        transport = stand_in(rank, places[rank]).transport if places[rank] else None
        limits = dict(timeout_s=timeout_s, assembly_s=5, transport=transport)
        found[rank] = RankGroup(own, shape, rank, host=HOST, **limits)

    errors = on_all(shape.num_gpus, join)
    return [error or each for error, each in zip(errors, found, strict=True)]


@pytest.mark.parametrize("settings", ["whole", "chunked"])
@pytest.mark.parametrize("shape", [(2, 1), (1, 2), (2, 2)], ids=str)
def test_tokens_equal_generate(shape, settings, ranks_of, rig_type, make_request):
    ranks = ranks_of(MODEL, *shape, on_device=True)
    engine = ranks.engine(Role.COLOCATED, **SETTINGS[settings])
    assert all(isinstance(pool, DevicePool) for pool in ranks.pools())
    assert engine.pool.block_size == 256, "pages as varlen_attn reads them"
    requests = [make_request(f"r{n}", n, max_tokens=20) for n in (1, 15, 17, 40, 100)]
    for request, answer in zip(requests, answers(rig_type, engine, requests), strict=True):
        assert answer.token_ids == generate(MODEL, request.prompt_token_ids, 20)
    ranks.runner.beat()
    assert all(busy_s > 0 for busy_s in ranks.runner.busy_s)


def test_drawn_tokens_and_logprobs_are_those_of_cpu_ranks(ranks_of, rig_type, make_request):
    requests = [
        make_request(f"d{n}", n, seed=n, max_tokens=8, temperature=temperature, logprobs=named)
        for n, temperature, named in ((9, 0.7, None), (20, 1.1, 2), (33, 0.0, 1))
    ]
    both = [
        answers(
            rig_type, ranks_of(MODEL, 2, 1, on_device=on_device).engine(Role.COLOCATED), requests
        )
        for on_device in (False, True)
    ]
    for expected, answer in zip(*both, strict=True):
        assert answer.token_ids == expected.token_ids
        for entry, wanted in zip(answer.logprobs or (), expected.logprobs or (), strict=True):
            assert entry.logprob == pytest.approx(wanted.logprob, abs=1e-3)


@pytest.mark.parametrize("sides", [(True, True), (True, False), (False, True)], ids=str)
def test_kv_goes_on_between_cards_and_cpus_of_unlike_shapes(
    sides, ranks_of, rig_type, make_request
):
    prefill = ranks_of(MODEL, 2, 1, on_device=sides[0])
    decode = ranks_of(MODEL, 1, 2, number=1, on_device=sides[1])
    resharding = Resharding(rig_type, prefill, decode)
    rig = resharding.rig_type(
        prefill.engine(Role.PREFILL, block_size=16), decode.engine(Role.DECODE, block_size=16)
    )
    requests = [make_request(f"k{n}", n, max_tokens=10) for n in (1, 16, 50)]
    for request in requests:
        rig.submit(request)
    outcomes = rig.run()
    for request in requests:
        answer = outcomes[request.request_id]
        assert answer.token_ids == generate(MODEL, request.prompt_token_ids, 10)
        assert answer.timeline.num_recomputes == 0
    assert resharding.num_copied == 3


def test_every_rank_says_what_room_it_has(ranks_of):
    runner = ranks_of(MODEL, 1, 2, on_device=True).runner
    room = runner.default_kv_bytes(EngineConfig())
    runner.group.share(ROOM, "10")
    assert runner.default_kv_bytes(EngineConfig()) < room


def test_sums_and_hidden_states_arrive_in_order():
    groups = linked_groups(Parallelism(2, 2))
    got = {}

    def work(rank: int) -> None:
        own = groups[rank]
        total = own.reduce_stage(torch.full((3,), float(rank)))
        if own.is_first:
            for tag in range(3):
                own.hand_on(total + 10 * rank + tag, tag)
        else:
            waits = [own.handed_on(torch.empty(3), tag) for tag in range(3)]
            got[rank] = [wait()[0].item() for wait in waits]

    assert on_all(4, work) == [None] * 4
    assert got == {2: [1.0, 2.0, 3.0], 3: [11.0, 12.0, 13.0]}
    for each in groups:
        each.close()


def test_a_card_that_hangs_is_a_lost_group_in_time(quick_last_words):
    groups = linked_groups(Parallelism(2, 1), timeout_s=0.5)
    started_at = time.monotonic()
    errors = on_all(2, lambda rank: time.sleep(2) if rank else groups[0].until(lambda: False))
    assert "rank 1 is dead or silent" in str(errors[0])
    assert time.monotonic() - started_at < 5
    groups[1].close()


def test_who_waits_for_a_card_learns_that_another_rank_failed(quick_last_words):
    groups = linked_groups(Parallelism(2, 1), timeout_s=30)
    started_at = time.monotonic()

    def work(rank: int) -> None:
        if rank:
            raise groups[1].fail(ValueError("out of memory"))
        groups[0].until(lambda: False)

    errors = on_all(2, work)
    assert all("rank 1 failed: ValueError: out of memory" in str(error) for error in errors)
    assert time.monotonic() - started_at < 5


@pytest.mark.parametrize("hanging", [0, 1])
def test_an_instance_whose_card_hangs_is_lost_in_time(hanging, quick_last_words):
    config = EngineConfig(model=MODEL, dtype="float32", rank_timeout_s=1.5)
    ranks = launch(config, Parallelism(2, 1), device_of=stand_in)
    ranks.runner.bind(ranks.runner.new_pool(8, 16).pages)
    stage = ranks.followers[1].stage if hanging else ranks.runner.stage
    stage.computing.answer = lambda *step: Answering(lambda: False, lambda: None)
    ones = np.ones(1, np.int32)
    step = ForwardBatch(ones, ones - 1, np.array([0, 1], np.int32), ones, ones[:, None])
    started_at = time.monotonic()
    with pytest.raises(InstanceLost, match="of TP2xPP1 is lost"):
        ranks.runner.begin(step, [])()
    assert time.monotonic() - started_at < 10
    ranks.close()
    assert isinstance(ranks.errors[1], InstanceLost)


def test_what_a_closed_group_left_on_a_card_is_no_result():
    own, other = linked_groups(Parallelism(2, 1))
    threading.Timer(0.2, own.close).start()
    with pytest.raises(InstanceLost, match="is over"):
        own.until(lambda: own._is_over)
    other.close()


@pytest.mark.parametrize(
    ("places", "message"),
    [
        (["cuda GPU-a", None], "unlike devices: rank 0 cuda GPU-a, rank 1 cpu; set device"),
        (["cuda GPU-a", "cuda GPU-a"], "needs a card of its own: rank 0 cuda GPU-a, rank 1 cuda"),
    ],
)
def test_devices_that_do_not_go_together_are_refused_by_all(places, message):
    for error in linked_groups(Parallelism(1, 2), places=places):
        assert isinstance(error, ModelError) and message in str(error)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_rank_without_a_card_is_an_error_that_the_others_learn():
    shape, config = Parallelism(2, 1), EngineConfig(model=MODEL, device="cuda")
    meeting, store = open_group(shape, HOST, 20)
    common = dict(host=HOST, address="here", load_timeout_s=20)

    def start(rank: int) -> None:
        if rank:
            start_rank(config, shape, 1, join_group(meeting, 1, 5), **common)
        else:
            start_rank(config, shape, 0, store, device=stand_in(0), **common)

    head, other = on_all(2, start)
    assert isinstance(other, ConfigError) and "device=cuda: PyTorch" in str(other)
    assert "rank 1 failed: device=cuda: PyTorch" in str(head)

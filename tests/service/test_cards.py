"""Who gets which GPU, and what is said where there is none."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from daskserve import EngineConfig, SamplingParams, Service
from daskserve.core.placement import Parallelism
from daskserve.errors import ConfigError
from daskserve.service import cards
from daskserve.service.cards import on_device, share_cards
from daskserve.service.local import _joined

ONE = Parallelism()


def test_every_rank_has_a_card_while_there_are_enough():
    found = share_cards(["0", "1", "2"], 2, "ucx")
    assert found.of_rank == ("0", "1") and found.most_on_one == 1


def test_instances_share_a_card_and_its_memory():
    found = share_cards(["3"], 2, "tcp")
    assert found.of_rank == ("3", "3")
    config = found.engine(EngineConfig(gpu_memory_fraction=0.8))
    assert config.device == "cuda" and config.gpu_memory_fraction == pytest.approx(0.4)


def test_the_ranks_of_an_instance_are_on_different_cards(monkeypatch):
    monkeypatch.setattr(cards.metadata, "version", lambda name: "2.13.0")
    monkeypatch.setattr(cards, "visible_cards", lambda: ["4", "5"])
    shapes = [Parallelism(tp=2, pp=1), Parallelism(tp=1, pp=2)]
    settled, found = on_device(EngineConfig(), "cuda", shapes, "tcp")
    assert settled.device == "cuda" and found.of_rank == ("4", "5", "4", "5")
    wide = [ONE, Parallelism(tp=2, pp=2)]
    with pytest.raises(ConfigError, match="TP2xPP2 has 4 ranks, 2 GPUs are visible"):
        on_device(EngineConfig(), "cuda", wide)
    assert on_device(EngineConfig(), "auto", wide)[1] is None


def test_a_worker_sees_its_card_alone():
    found = share_cards(["0", "GPU-ab"], 2, "ucx")
    base = {"env": {"OMP_NUM_THREADS": "2"}, "config": {"daskserve.rank": {}}, "nthreads": 4}
    options = _joined(base, found.options_of(1))
    assert options["env"] == {"OMP_NUM_THREADS": "2", "CUDA_VISIBLE_DEVICES": "GPU-ab"}
    assert options["config"]["daskserve.rank"] == {} and options["nthreads"] == 4
    assert options["config"]["distributed-ucxx.create-cuda-context"] is True
    assert "config" not in replace(found, protocol="tcp").options_of(0)


def test_what_is_missing_is_named(monkeypatch):
    config = EngineConfig(model="tiny-random-llama")
    for version, missing in (("2.13.0+cpu", "built without CUDA"), ("2.13.0", "no GPU is visible")):
        monkeypatch.setattr(cards.metadata, "version", lambda name, v=version: v)
        monkeypatch.setattr(cards, "visible_cards", lambda: [])
        with pytest.raises(ConfigError, match=missing):
            on_device(config, "cuda", [ONE, ONE])
        settled, found = on_device(config, "auto", [ONE, ONE])
        assert found is None and settled.device == "cpu"
    monkeypatch.setattr(cards, "_DASK_CUDA", {"no_such_module": "dask-cuda"})
    with pytest.raises(ConfigError, match="dask-cuda.*pip install"):
        cards.require_dask_cuda()


def test_a_service_on_cuda_without_it_starts_nothing(monkeypatch):
    monkeypatch.setattr(cards, "visible_cards", lambda: [])
    with pytest.raises(ConfigError, match="device=cuda: "):
        Service.local(device="cuda", config=EngineConfig(model="tiny-random-llama"))


def test_the_mock_model_runs_where_there_is_no_gpu():
    settled, found = on_device(EngineConfig(model="mock"), "cuda", [ONE])
    assert found is None and settled.device == "cpu"


def test_nothing_of_cuda_is_imported_by_a_client():
    code = (
        "import sys, daskserve, daskserve.cli, daskserve.service.local, daskserve.service.kv_pull\n"
        "found = {'torch', 'triton', 'dask_cuda', 'distributed_ucxx', 'rmm'} & set(sys.modules)\n"
        "sys.exit(f'imported: {found}' if found else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "instances",
    [
        dict(colocated=[Parallelism(2, 1)]),
        dict(colocated=[Parallelism(1, 2)]),
        dict(prefill=[Parallelism(2, 1)], decode=[Parallelism(1, 2)]),
    ],
    ids=["TP2", "PP2", "TP2 to PP2"],
)
def test_ranks_on_two_cards_give_the_tokens_of_one_on_the_cpu(instances):
    if len(cards.visible_cards()) < 2:
        pytest.skip("needs two GPUs")
    config = EngineConfig(model="tiny-random-llama", dtype="float32", num_kv_blocks=200)
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    prompts = ["a", "The quick brown fox", "x" * 90]

    def tokens(device: str, **instances) -> list[tuple[int, ...]]:
        options = dict(config=config, device=device, cores=None, protocol="tcp")
        with Service.local(**instances, **options) as service:
            done = service.client.gather(service.map(prompts, params))
        return [completion.token_ids for completion in done]

    assert tokens("cuda", **instances) == tokens("cpu", colocated=1)

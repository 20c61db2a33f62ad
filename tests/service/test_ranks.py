"""Instances of several workers on a real cluster of processes."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace

import dask
import pytest
from click.testing import CliRunner
from distributed import Client

from daskserve import EngineConfig, SamplingParams, Service
from daskserve.cli import main
from daskserve.config import settings
from daskserve.core.instance import Role
from daskserve.core.placement import GPULocation, InstancePlacement, Parallelism, Placement
from daskserve.core.request import Completion
from daskserve.errors import ConfigError, ModelError
from daskserve.models.catalog import resolve
from daskserve.planner.placement_file import placement_to_yaml
from daskserve.service.instance_plugin import _check_place

CONFIG = EngineConfig(
    model="tiny-random-llama",
    dtype="float32",
    num_kv_blocks=200,
    num_threads=1,
    rank_timeout_s=20,
)
PARAMS = SamplingParams(max_tokens=12, ignore_eos=True)
PROMPTS = ["a", "The quick brown fox", "x" * 90, *(f"prompt number {i} " * 2 for i in range(9))]


@pytest.fixture(scope="module")
def expected(attach) -> Iterator[Callable[[list[str], SamplingParams], list[Completion]]]:
    """The answers of one instance of one worker."""
    with attach(CONFIG, colocated=1) as service:

        def ask(prompts, params):
            return service.client.gather(service.map(prompts, params))

        yield ask


@pytest.fixture(scope="module")
def unlike() -> Iterator[Service]:
    """A prefill instance of two tensor-parallel ranks, a decode instance of two stages."""
    with Service.local(
        prefill=[Parallelism(2, 1)], decode=[Parallelism(1, 2)], config=CONFIG, cores=None
    ) as service:
        yield service


def kill(service: Service, name: str) -> None:
    workers = service.client.scheduler_info(n_workers=-1)["workers"]
    [address] = [address for address, worker in workers.items() if worker["name"] == name]
    [pid] = service.client.run(os.getpid, workers=[address]).values()
    os.kill(pid, signal.SIGKILL)


def tokens(answers: list[Completion]) -> list[tuple[int, ...]]:
    return [answer.token_ids for answer in answers]


def location(number: int) -> GPULocation:
    return GPULocation(0, number)


@pytest.mark.timeout(180)
@pytest.mark.slow
def test_a_placement_of_two_stages_answers_a_batch(tmp_path, expected):
    instance = InstancePlacement(
        Role.COLOCATED, Parallelism(1, 2), (location(0), location(1)), kv_capacity_tokens=3200
    )
    placement = tmp_path / "placement.yaml"
    placement.write_text(placement_to_yaml(Placement((instance,), gpus_per_node=2)))
    rows, answers = tmp_path / "rows.jsonl", tmp_path / "answers.jsonl"
    rows.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    given = ["--placement", placement, "--model", CONFIG.model, "--dtype", "float32", "--quiet"]
    options = ["--max-tokens", 12, "--ignore-eos", "-i", rows, "-o", answers]
    result = CliRunner().invoke(main, ["run-batch", *map(str, [*given, *options])])
    assert result.exit_code == 0, result.output
    lines = [json.loads(line) for line in answers.read_text().splitlines()]
    texts = {line["custom_id"]: line["text"] for line in lines}
    wanted = [answer.text for answer in expected(PROMPTS, PARAMS)]
    assert [texts[f"line-{number}"] for number in range(1, len(PROMPTS) + 1)] == wanted


@pytest.mark.slow
def test_prefill_and_decode_of_unlike_shapes_answer_a_batch(unlike, expected, is_idle, eventually):
    answers = unlike.client.gather(unlike.map(PROMPTS, PARAMS))
    assert tokens(answers) == tokens(expected(PROMPTS, PARAMS))
    assert all(answer.timeline.num_recomputes == 0 for answer in answers)
    assert len(unlike.info()) == 2  # heads only
    eventually(lambda: is_idle(unlike))


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["decode-1.1", "prefill-0.1", "decode-1"])
def test_a_killed_rank_loses_no_row(name, unlike, expected, is_idle, eventually):
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    prompts = [f"row {i} " * 4 for i in range(30)]
    futures = unlike.map(prompts, params)
    futures[0].result(timeout=60)
    kill(unlike, name)
    answers = [future.result(timeout=120) for future in futures]
    assert tokens(answers) == tokens(expected(prompts, params))
    eventually(lambda: len(unlike.load()) == 2 and is_idle(unlike), timeout_s=60)


@pytest.mark.slow
def test_a_shape_that_the_model_does_not_have_is_refused_at_start():
    shape = Parallelism(1, 3)
    with pytest.raises(ModelError, match="pp=3 must be at most the model's 2 layers"):
        Service.local(prefill=0, decode=0, colocated=[shape], config=CONFIG, cores=None)


def test_only_the_head_carries_a_role():
    with dask.config.set(
        {
            "daskserve.rank.instance": "decode-0",
            "daskserve.rank.number": 1,
            "daskserve.rank.tensor-parallel": 2,
        }
    ):
        place = settings().rank
    _check_place(place, None)
    with pytest.raises(ConfigError, match="number=1 of decode-0 must carry no resource DECODE"):
        _check_place(place, Role.DECODE)


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"number": 2, "tensor-parallel": 2, "instance": "a"}, "number=2 must be below 2"),
        ({"pipeline-parallel": 2}, "instance must name which instance"),
    ],
)
def test_a_place_that_cannot_be_is_refused(changes, part):
    with dask.config.set({f"daskserve.rank.{name}": value for name, value in changes.items()}):
        with pytest.raises(ConfigError, match=part):
            settings()


def test_a_late_instance_that_keeps_its_kv_otherwise_is_refused_with_both_values(
    cluster, tmp_path, eventually
):
    """The same model's name, but not the same model over there."""
    folder = tmp_path / "model"
    folder.symlink_to(resolve("tiny-random-llama"))
    config = replace(CONFIG, model=str(folder))
    with (
        cluster(prefill=1, decode=1) as own,
        Client(own) as client,
        Service.attach(client, config) as service,
    ):
        folder.unlink()
        folder.symlink_to(resolve("tiny-random-qwen3"))
        own.worker_spec["late"] = own.worker_spec["DECODE-0"]
        own.sync(own._correct_state)
        refused: list[str] = []

        def is_refused() -> bool:
            instances = service.status()["instances"]
            refused.extend(i["error"] for i in instances if i["status"] == "failed")
            return bool(refused)

        eventually(is_refused, timeout_s=30)
        assert "float32 block_size=16 2x4x16, the" in refused[0]
        assert "float32 block_size=16 2x4x8" in refused[0]
        answer = service.submit("a", PARAMS).result(timeout=30)  # those that match go on
        assert answer.timeline.num_recomputes == 0

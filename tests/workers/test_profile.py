"""The prefill profile: where its knee is, and that engines find it again."""

from __future__ import annotations

import dataclasses

import pytest

from daskserve.core.instance import EngineConfig, Role
from daskserve.errors import ConfigError
from daskserve.models.catalog import resolve
from daskserve.workers.forward import HostRunner
from daskserve.workers.loader import load_runner
from daskserve.workers.loading import build_engine
from daskserve.workers.profile import (
    Machine,
    PrefillPoint,
    PrefillProfile,
    knee,
    measure,
    profile_prefill,
    stored_budget,
)

CONFIG = EngineConfig(model="tiny-random-llama", dtype="float32", num_threads=1, num_kv_blocks=8)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache folder, and a configuration whose model is outside it."""
    model_dir = resolve(CONFIG.model)
    monkeypatch.setenv("DASKSERVE_CACHE", str(tmp_path))
    return dataclasses.replace(CONFIG, model=str(model_dir))


def test_the_knee_is_the_smallest_step_near_the_best_throughput() -> None:
    rates = {32: 400.0, 64: 700.0, 128: 940.0, 256: 960.0, 512: 1000.0, 1024: 900.0}
    points = [PrefillPoint(1, size, size / rate) for size, rate in rates.items()]
    assert knee(points) == 256
    assert knee(points, share=0.9) == 128
    assert knee(points, share=1.0) == 512


def test_measured_steps_cover_sizes_alone_and_batched() -> None:
    runner = load_runner(resolve(CONFIG.model), CONFIG)
    points = measure(runner, block_size=16, step_tokens=(32, 256, 4096))
    assert [(p.num_prompts, p.prompt_tokens) for p in points] == [(1, 32), (1, 256), (2, 128)]
    assert all(point.step_s > 0 for point in points), "4096 is over the context and left out"


def test_an_engine_uses_the_profile_of_its_machine(cache) -> None:
    seen = []
    assert stored_budget(cache) is None
    assert build_engine(Role.PREFILL, cache).budget_tokens == HostRunner.budget_tokens
    profile = profile_prefill(cache, seen.append)
    assert [p.num_tokens for p in seen] == [p.num_tokens for p in profile.points]
    assert stored_budget(cache) == profile.budget_tokens
    assert build_engine(Role.PREFILL, cache).budget_tokens == profile.budget_tokens
    explicit = dataclasses.replace(cache, prefill_budget_tokens=77)
    assert build_engine(Role.PREFILL, explicit).budget_tokens == 77
    other_threads = dataclasses.replace(cache, num_threads=2)
    assert stored_budget(other_threads) is None


def test_a_damaged_profile_is_ignored(cache) -> None:
    path = Machine.of(cache).path
    path.parent.mkdir(parents=True)
    for content in ("", "[]", '{"points": []}', '{"points": [{"num_prompts": 1}]}'):
        path.write_text(content)
        assert stored_budget(cache) is None


def test_the_mock_has_no_profile() -> None:
    with pytest.raises(ConfigError):
        profile_prefill(EngineConfig(model="mock"))


def test_the_table_marks_the_chosen_size() -> None:
    points = (PrefillPoint(1, 64, 0.1), PrefillPoint(1, 256, 0.2), PrefillPoint(2, 128, 0.1))
    table = PrefillProfile(Machine("m", "float32", 1, "cpu"), points).table()
    assert [line.split()[:3] for line in table.splitlines()[2:]] == [
        ["64", "640", "640"],
        ["256", "1280", "2560"],
    ]
    assert table.splitlines()[-1].endswith("<- L_m")

"""The whole way: a small model is measured, its profile written and planned with."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from daskserve import calibrate_command
from daskserve.calibrate import run
from daskserve.calibrate.plot import check_can_plot, save_plot
from daskserve.calibrate.run import calibrate, check_writable
from daskserve.cli import main
from daskserve.core.instance import EngineConfig
from daskserve.errors import ConfigError
from daskserve.models import resolve
from daskserve.planner.latency import read_calibration
from daskserve.planner.model_spec import ModelSpec
from daskserve.workers.profile import stored_budget

CONFIG = EngineConfig("tiny-random-llama", num_threads=1, max_batch_size=8)


@pytest.fixture(scope="module")
def found(tiny):
    return calibrate(CONFIG, tiny)


@pytest.mark.slow
def test_a_calibration_holds_what_was_measured(found, tmp_path):
    assert {step.phase for step in found.steps} == {"prefill", "decode"}
    assert all(step.median_s > 0 and step.num_repeats >= 3 for step in found.steps)
    assert sum(step.is_held_out for step in found.steps) >= 6
    assert [point.num_repeats for point in found.kv_transfers] == [3, 3]
    sizes = [point.kv_bytes for point in found.kv_transfers]
    assert sizes[1] == 4 * sizes[0]
    assert sizes[0] == 16 * found.model.kv_bytes_per_token
    assert 0 < found.overheads.dispatch.median_s < 1
    assert (found.engine.num_threads, found.engine.max_batch_size) == (1, 8)
    assert found.machine.versions["torch"][0].isdigit()
    assert found.model.name == "tiny-random-llama"
    spec = ModelSpec.load(str(resolve("tiny-random-llama")))
    assert found.model.num_parameters == spec.num_parameters
    found.write(tmp_path / "profile.json")
    assert read_calibration(tmp_path / "profile.json", allow_untrusted=True) == found


@pytest.mark.slow
def test_a_calibration_is_planned_with(found, tmp_path):
    found.model_copy(update={"is_trusted": True}).write(tmp_path / "profile.json")
    words = ["plan", "--latency", str(tmp_path / "profile.json"), "--gpus", "CPU:2", "--rate", "1"]
    words += ["--prompt-tokens", "64", "--output-tokens", "16", "--ttft", "5", "--tpot", "5"]
    answer = CliRunner().invoke(main, [*words, "-o", str(tmp_path / "placement.yaml")])
    assert answer.exit_code == 0, answer.output


@pytest.mark.slow
@pytest.mark.parametrize(("is_trusted", "exit_code"), [(True, 0), (False, 3)])
def test_the_command_prints_writes_and_judges(found, tmp_path, monkeypatch, is_trusted, exit_code):
    reasons = [] if is_trusted else ["decode: off; worst: 8 x 64 +70%"]
    told = found.model_copy(update={"is_trusted": is_trusted, "why_not": reasons})
    monkeypatch.setattr(run, "calibrate", lambda *given: told)
    path = tmp_path / "profile.json"
    answer = CliRunner().invoke(main, ["calibrate", "--quick", "-o", str(path)])
    assert answer.exit_code == exit_code == (0 if is_trusted else calibrate_command.NOT_TRUSTED)
    assert json.loads(path.read_text())["is_trusted"] is is_trusted
    for step in found.steps:
        assert f"{step.phase} {step.batch} x {step.tokens} " in answer.output
    assert ("NOT trusted" in answer.output) is not is_trusted
    assert all(reason in answer.output for reason in reasons)


@pytest.mark.slow
def test_a_kept_budget_is_used_by_engines(found, tmp_path, monkeypatch):
    monkeypatch.setenv("DASKSERVE_CACHE", str(tmp_path))
    assert stored_budget(CONFIG) is None
    run.keep_budget(CONFIG, found)
    kept = stored_budget(CONFIG)
    assert kept in {step.batch * step.tokens for step in found.steps if step.phase == "prefill"}
    slower = [step.model_copy(update={"median_s": 1.0}) for step in found.steps]
    run.keep_budget(CONFIG, found.model_copy(update={"steps": slower}))
    assert stored_budget(CONFIG) == kept, "what was measured before is not overwritten"


def test_a_profile_that_cannot_be_written_is_refused_before_measuring(tmp_path):
    for path in (tmp_path, tmp_path / "none" / "profile.json"):
        with pytest.raises(ConfigError, match="cannot write"):
            check_writable(path)
    answer = CliRunner().invoke(main, ["calibrate", "-o", str(tmp_path / "none" / "p.json")])
    assert answer.exit_code == 1 and "cannot write" in answer.output


@pytest.mark.slow
def test_a_picture_needs_matplotlib_and_a_name(found, tmp_path):
    with pytest.raises(ConfigError, match="must end in .png"):
        check_can_plot(tmp_path / "residuals.txt")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        with pytest.raises(ConfigError, match="needs matplotlib: pip install"):
            check_can_plot(tmp_path / "residuals.png")
        return
    check_can_plot(tmp_path / "residuals.png")
    save_plot(found, tmp_path / "residuals.png")
    assert (tmp_path / "residuals.png").read_bytes().startswith(b"\x89PNG")

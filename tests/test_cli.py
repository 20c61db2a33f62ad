from __future__ import annotations

import os

import click
import pytest
from click.testing import CliRunner

import daskserve.cli
from daskserve.cli import main
from daskserve.command_options import engine_config
from daskserve.errors import ConfigError
from daskserve.models import DEFAULT_MODEL


def run(*arguments):
    """Exit code and standard error of a command that must not show a traceback."""
    result = CliRunner().invoke(main, [str(a) for a in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result.exit_code, result.stderr


@pytest.fixture
def job(tmp_path):
    (tmp_path / "in.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    return ["run-batch", "--model", "mock", "-i", tmp_path / "in.jsonl"]


def test_every_option_has_a_help_text():
    for command in main.commands.values():
        assert command.help
        for parameter in command.params:
            assert isinstance(parameter, click.Argument) or parameter.help, parameter.name


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--max-tokens", 0], "max_tokens=0 must be 1..1000000"),
        (["--temperature", "nan"], "temperature=nan must be 0..2"),
        (["--top-p", 7], "top_p=7.0 must be 0..1"),
        (["--slo-ttft", 1], "--slo-ttft and --slo-tpot go together"),
        (["--slo-ttft", 0, "--slo-tpot", 1], "ttft_s=0.0 must be"),
        (["--colocated", 1, "--prefill", 1], "not both"),
        (["--scheduler", "tcp://x:1", "--decode", 1], "--decode: on an existing scheduler"),
        (["--scheduler", "tcp://x:1", "--protocol", "ucx"], "--protocol: that of tcp://x:1"),
        (["--model", "smollm-135m"], "no model 'smollm-135m'; did you mean 'smollm2-135m'?"),
        (["-i", "none.jsonl"], "cannot read input 'none.jsonl': No such file or directory"),
        (["-i", "http://host/in.jsonl"], "is a URL"),
        (["-o", "out.csv"], "output out.csv must end in .jsonl"),
        (["-o", "in.jsonl", "--restart"], "output in.jsonl is the input"),
        (["-o", "in.jsonl/out.jsonl"], "cannot write output in.jsonl/out.jsonl: Not a directory"),
    ],
)
def test_errors_are_one_line_without_traceback(job, tmp_path, monkeypatch, arguments, part):
    monkeypatch.chdir(tmp_path)
    code, message = run(*job, "-o", tmp_path / "out.jsonl", *arguments)
    assert code == 1
    assert message.startswith("error: ") and message.count("\n") == 1
    assert part in message
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_output_without_permission(job, tmp_path):
    (tmp_path / "closed").mkdir(mode=0o500)
    code, message = run(*job, "-o", tmp_path / "closed" / "out.jsonl")
    assert (code, message.count("\n")) == (1, 1)
    assert "Permission denied" in message


def test_repeated_id_is_refused_before_anything_starts(job, tmp_path, monkeypatch):
    monkeypatch.setattr(daskserve.cli, "open_service", None)
    (tmp_path / "in.jsonl").write_text('{"prompt": "a", "custom_id": "x"}\n' * 2)
    code, message = run(*job, "-o", tmp_path / "out.jsonl")
    assert code == 1
    assert "custom_id 'x' is used twice, on line 1 and on line 2" in message


def test_wrong_setting_is_named(job, tmp_path):
    import dask.config

    with dask.config.set({"daskserve.batch.max-inflight": 3}):
        code, message = run(*job, "-o", tmp_path / "out.jsonl")
    assert (code, "did you mean daskserve.batch.max-in-flight?" in message) == (1, True)


def test_fetch_model_prints_the_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("DASKSERVE_CACHE", str(tmp_path))
    result = CliRunner().invoke(main, ["fetch-model", "mock"])
    assert result.exit_code == 0
    assert result.output.strip().startswith(str(tmp_path))
    assert run("fetch-model", "mick")[0] == 1


@pytest.mark.slow
def test_mock_has_nothing_to_profile():
    code, message = run("profile-prefill", "--model", "mock")
    assert code == 1
    assert message.startswith("error: the mock model has fixed step times")


@pytest.mark.slow
def test_profile_of_a_tiny_model_names_the_budget(tmp_path, monkeypatch):
    monkeypatch.setenv("DASKSERVE_CACHE", str(tmp_path))
    arguments = ["profile-prefill", "--model", "tiny-random-llama", "--dtype", "float32"]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0
    assert "<- L_m" in result.stdout
    assert list(tmp_path.glob("profiles/prefill-*.json"))


def placed(tmp_path, model: str) -> dict:
    file = tmp_path / "placement.yaml"
    file.write_text(
        f"version: 1\nmodel: {model}\ngpus_per_node: 1\n"
        "instances: [{role: COLOCATED, tp: 1, pp: 1, gpus: [[0, 0]]}]\n"
    )
    return {"model": None, "placement": str(file), "dtype": "float32", "device": "cpu"}


def test_a_placement_says_which_model_is_served(tmp_path):
    given = placed(tmp_path, "mock")
    assert engine_config(given).model == "mock"
    assert engine_config(given | {"model": "tiny-random-llama"}).model == "tiny-random-llama"
    assert engine_config(given | {"placement": None}).model == DEFAULT_MODEL


def test_a_placement_for_a_model_elsewhere_asks_where_it_is(tmp_path):
    with pytest.raises(ConfigError, match="planned for 'llama-3.1-70b'.*say with --model"):
        engine_config(placed(tmp_path, "llama-3.1-70b"))

"""The README's section on planning: its commands run, and print what it shows."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

from daskserve.cli import main

README = (Path(__file__).resolve().parents[2] / "README.md").read_text(encoding="utf-8")
SECTION = README.split("## Planning\n", 1)[1].split("\n## ", 1)[0]


@pytest.mark.slow
def test_commands_run_and_print_what_is_shown(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shell = re.search(r"```sh\n(.*?)```", SECTION, re.DOTALL).group(1)
    commands = [line for line in shell.splitlines() if line.startswith("daskserve ")]
    shown = re.search(r"```text\n(.*?)```", SECTION, re.DOTALL).group(1).splitlines()
    answers = [CliRunner().invoke(main, shlex.split(line)[1:]) for line in commands]
    assert [answer.exit_code for answer in answers] == [0, 0, 0], answers[-1].output
    assert len(shown) > 5
    assert [line for line in shown if line not in answers[0].output.splitlines()] == []


def test_the_python_of_the_section_runs(tmp_path, monkeypatch):
    rows = "".join(f"{i * 0.1:.1f},300,20\n" for i in range(300))
    (tmp_path / "trace.csv").write_text("arrival_s,prompt_tokens,output_tokens\n" + rows)
    monkeypatch.chdir(tmp_path)
    code = re.search(r"```python notest\n(.*?)```", SECTION, re.DOTALL).group(1)
    # Here and small: the section's point is the calls.
    for written, here in (
        ("client = Client()", "client = None"),
        ("llama-3.1-70b", "llama-3.1-8b"),
        ('Cluster.of("H100", 8)', 'Cluster.of("H100", 1, gpus_per_node=4)'),
        ("rate=40", "rate=40, seeds=(0,)"),
    ):
        assert written in code
        code = code.replace(written, here)
    names: dict = {}
    exec(compile(code, "README.md", "exec"), names)
    assert names["found"].status == "found"

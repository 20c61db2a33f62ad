"""The Python code of the README runs as it stands, but for the model; its commands exist."""

import re
import shlex
from pathlib import Path

from daskserve.cli import main

ROOT = Path(__file__).resolve().parent.parent


def test_the_python_code_runs(tmp_path, monkeypatch, capsys):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(blocks) == 1
    code = blocks[0].replace("smollm2-135m", "tiny-random-llama")
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples" / "prompts.jsonl").write_text('{"prompt": "hi", "max_tokens": 3}\n')
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "README.md", "exec"), {})
    assert (tmp_path / "out" / "answers.jsonl").read_text().count("\n") == 1
    assert "decode-" in capsys.readouterr().out


def test_every_command_is_in_the_readme():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert [name for name in main.commands if f"| `daskserve {name}` |" not in readme] == []


def test_the_commands_parse():
    readme = (ROOT / "README.md").read_text(encoding="utf-8").replace("\\\n", " ")
    shell = "\n".join(re.findall(r"```sh\n(.*?)```", readme, re.DOTALL))
    lines = [shlex.split(line, comments=True) for line in shell.splitlines()]
    given = [words[1:] for words in lines if words[:1] == ["daskserve"]]
    assert {name for name, *_ in given} >= {"run-batch", "serve", "bench"}
    for name, *arguments in given:
        main.commands[name].make_context(name, arguments).close()

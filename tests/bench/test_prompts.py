from __future__ import annotations

import pytest

from daskserve.bench.prompts import FileLines, RandomTokens, RandomWords, token_ids
from daskserve.errors import ConfigError


def test_random_tokens_have_the_length_and_share_no_prefix():
    prompts = RandomTokens(seed=3, low=7, high=9_000)
    first, second = prompts.prompt(0, 500), prompts.prompt(1, 500)
    assert len(first) == len(second) == 500
    assert first[:16] != second[:16]
    assert all(7 <= token_id <= 9_000 for token_id in first)
    assert RandomTokens(seed=3, low=7, high=9_000).prompt(1, 500) == second
    assert RandomTokens(seed=4, low=7, high=9_000).prompt(1, 500) != second


def test_random_words_are_a_message():
    [message] = RandomWords(0).prompt(5, 40)
    assert (message["role"], len(message["content"].split())) == ("user", 40)


def test_lines_of_text_are_taken_in_turn(tmp_path):
    (tmp_path / "p.txt").write_text("one\n\ntwo\n")
    lines = FileLines(tmp_path / "p.txt", is_chat=False)
    assert [lines.prompt(index, 9) for index in range(3)] == ["one", "two", "one"]
    chat = FileLines(tmp_path / "p.txt", is_chat=True)
    assert chat.prompt(1, 9) == [{"role": "user", "content": "two"}]


def test_lines_of_json(tmp_path):
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "one"}\n{"messages": [{"role": "user", "content": "u"}]}\n')
    chat = FileLines(path, is_chat=True)
    assert chat.prompt(0, 1) == [{"role": "user", "content": "one"}]
    assert chat.prompt(1, 1) == messages[1:]
    with pytest.raises(ConfigError, match="line 2 has messages: those need --endpoint chat"):
        FileLines(path, is_chat=False)


@pytest.mark.parametrize("line", ["{", "[]", '{"prompt": ""}', '{"prompt": 3}', "{}"])
def test_a_line_without_a_prompt_is_named(tmp_path, line):
    path = tmp_path / "p.jsonl"
    path.write_text(f'{{"prompt": "a"}}\n{line}\n')
    with pytest.raises(ConfigError, match="line 2"):
        FileLines(path, is_chat=True)


def test_files_without_prompts(tmp_path):
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(ConfigError, match="holds no prompt"):
        FileLines(tmp_path / "empty", is_chat=False)
    with pytest.raises(ConfigError, match="cannot read prompts"):
        FileLines(tmp_path / "none", is_chat=False)


@pytest.mark.parametrize("text", ["", "5", "a-b", "9-9", "-1-4"])
def test_token_ids_must_be_a_range(text):
    with pytest.raises(ConfigError, match="ids"):
        RandomTokens(0, *token_ids(text))

"""The documentation says what the code does: it is made from it, and its links and tests exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from daskserve.reference import reference, yaml_comments

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_the_configuration_reference_is_up_to_date():
    made = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert made == reference(), "python -m daskserve.reference > docs/configuration.md"


def test_every_environment_variable_is_in_the_reference():
    folders = ("daskserve", "workers", "planner", "dashboards")
    code = "".join(path.read_text("utf-8") for f in folders for path in (ROOT / f).rglob("*.py"))
    names = set(re.findall(r'"(DASKSERVE_[A-Z0-9_]+)"', code))
    assert names
    assert [name for name in sorted(names) if f"`{name}`" not in reference()] == []


def test_a_comment_of_several_lines_is_one():
    text = "top:\n  section:   # of all\n    key: 3   # first\n       # second\n    other: 1  # x\n"
    assert yaml_comments(text) == {"section.key": "first second", "section.other": "x"}


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_links_lead_somewhere(page):
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    links = re.findall(r"\]\(([^)\s]+)\)", text)
    for link in links:
        if not link.startswith("https://"):
            path, _, anchor = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            assert target.exists(), link
            assert not anchor or anchor in anchors(target), link


def anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_every_page_is_in_the_index():
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    pages = [*(ROOT / "docs").glob("*.md"), *(ROOT / "notebooks").glob("*.ipynb")]
    assert [page.name for page in pages if page.name not in index and page.stem != "index"] == []


def test_the_tests_behind_the_promises_exist_and_are_marked_slow_where_it_says_so():
    promises = (ROOT / "docs" / "promises.md").read_text(encoding="utf-8")
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`( \(slow\))?", promises)
    assert len(named) > 40
    for path, name, slow in named:
        source = (ROOT / path).read_text(encoding="utf-8")
        if name:
            assert is_slow(source, name) == bool(slow), f"{path}::{name}"


def is_slow(source: str, name: str) -> bool:
    """Whether a test never runs by default, by its own mark or its module's."""
    body = ast.parse(source).body
    [test] = [node for node in body if getattr(node, "name", "") == name]
    marks = [ast.unparse(mark) for mark in test.decorator_list]
    marks += [ast.unparse(n.value) for n in body if ast.unparse(n).startswith("pytestmark = ")]
    return any("pytest.mark.slow" in mark and "param" not in mark for mark in marks)


def test_modules_that_the_life_of_a_request_names_exist():
    life = (ROOT / "docs" / "life_of_a_request.md").read_text(encoding="utf-8")
    names = set(re.findall(r"`([\w/]+\.py)`", life))
    folders = ("daskserve", "workers", "planner")
    modules = {str(path.relative_to(ROOT)) for f in folders for path in (ROOT / f).rglob("*.py")}
    assert len(names) > 15
    assert [one for one in names if not any(f"/{m}".endswith(f"/{one}") for m in modules)] == []

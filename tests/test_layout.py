"""Sizes that keep the code readable, and import names that a user's own files cannot catch."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("daskserve", "workers", "planner", "dashboards", "benchmarks", "tests")
LINKED = {"planner", "workers", "dashboards"}
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60

# The links daskserve/workers and so on lead to files that stand in FOLDERS already.
FILES = [
    path
    for folder in FOLDERS
    for path in sorted((ROOT / folder).rglob("*.py"))
    if not any(parent.is_symlink() for parent in path.parents)
]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_and_functions_are_short_and_import_by_full_name(path):
    source = path.read_text(encoding="utf-8")
    assert source.count("\n") <= MAX_FILE_LINES
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            num_lines = node.end_lineno - node.lineno + 1
            assert num_lines <= MAX_FUNCTION_LINES, f"{node.name} has {num_lines} lines"
        elif isinstance(node, ast.Import):
            assert not LINKED & {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            assert node.module.split(".")[0] not in LINKED


def test_the_links_lead_to_the_top_level_folders():
    for name in LINKED:
        assert (ROOT / "daskserve" / name).resolve() == ROOT / name

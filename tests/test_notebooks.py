"""Notebooks are committed as they ran: whole, small, and without a word of the machine.

They run by ``pytest --nbmake notebooks``; ``--overwrite`` keeps the outputs.
"""

from __future__ import annotations

import getpass
import json
import re
import socket
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[1] / "notebooks"
MOST_BYTES = 300_000
MACHINE = ("/home/", "/root", "/tmp/", "/Users/", "/work", "/usr/", getpass.getuser() + "@")


@pytest.fixture(params=sorted(FOLDER.glob("*.ipynb")), ids=lambda path: path.stem)
def notebook(request) -> Path:
    return request.param


def code_cells(path: Path) -> list[dict]:
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


def test_every_cell_ran_in_order(notebook):
    cells = code_cells(notebook)
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))


def test_outputs_are_small_and_say_nothing_of_the_machine(notebook):
    assert notebook.stat().st_size < MOST_BYTES
    outputs = [output for cell in code_cells(notebook) for output in cell["outputs"]]
    assert outputs
    for output in outputs:
        assert output["output_type"] != "error" and output.get("name") != "stderr"
        text = json.dumps({k: v for k, v in output.get("data", {}).items() if "image" not in k})
        text += json.dumps(output.get("text", ""))
        assert [word for word in (*MACHINE, socket.gethostname()) if word in text] == []


def test_every_picture_names_its_axes(notebook):
    drawn = [cell for cell in code_cells(notebook) if any(
        "image/png" in output.get("data", {}) for output in cell["outputs"]
    )]  # fmt: skip
    for cell in drawn:
        assert re.search(r"xlabel=|set_xlabel", "".join(cell["source"]))

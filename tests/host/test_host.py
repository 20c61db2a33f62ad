from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from daskserve.host.gpus import GPU, visible_gpus
from daskserve.host.links import infiniband
from daskserve.host.machine import room
from daskserve.host.packages import versions, wire_digest


def test_infiniband_ports_are_read_as_the_kernel_lists_them(tmp_path):
    port = tmp_path / "mlx5_0" / "ports" / "1"
    port.mkdir(parents=True)
    for name, text in (("state", "4: ACTIVE\n"), ("rate", "200 Gb/sec (4X HDR)\n")):
        (port / name).write_text(text)
    [found] = infiniband(tmp_path)
    assert (found.device, found.is_active, found.bytes_per_s) == ("mlx5_0", True, 25e9)
    assert found.link_layer == "" and infiniband(tmp_path / "none") == []


@pytest.mark.parametrize(
    ("visible", "seen"), [("1", [1]), ("1,0", [1, 0]), ("", []), ("GPU-b", [1]), (None, [0, 1])]
)
def test_a_process_sees_the_gpus_of_its_environment(monkeypatch, visible, seen):
    every = [GPU(0, "H100", "GPU-a1", 1, 1), GPU(1, "H100", "GPU-b1", 1, 1)]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [gpu.index for gpu in visible_gpus(every)] == seen


def test_room_of_a_folder_that_is_not_there_yet(tmp_path):
    assert room(tmp_path / "a" / "b").free_bytes > 0


def test_versions_are_of_what_is_installed_and_import_nothing():
    code = (
        "import sys; from daskserve.host.packages import versions; found = versions();"
        "assert 'torch' not in sys.modules and 'numba' not in sys.modules; print(found['python'])"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == versions()["python"]


def test_the_digest_is_of_the_code_between_processes():
    assert len(wire_digest()) == 12
    package = Path(__file__).parent.parent.parent / "daskserve"
    assert {"core", "service"} <= {folder.name for folder in package.iterdir()}

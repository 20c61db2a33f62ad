from __future__ import annotations

import os
import resource
from dataclasses import replace

import orjson
import pyarrow.parquet
import pytest

from daskserve.batch.folder import JobFolder
from daskserve.batch.manifest import Manifest
from daskserve.batch.outcome import Outcome
from daskserve.batch.writer import FORMATS, ResultWriter, format_of
from daskserve.errors import BatchError

MANIFEST = Manifest("ab", 3, "tiny", "cd", "float32", {"max_tokens": 4, "stop": ("a",)}, "jsonl")


def line_of(row):
    usage = {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}
    record = {"custom_id": f"id-{row}", "text": f"é{row}", "finish_reason": "stop", "usage": usage}
    return orjson.dumps({**record, "error": None}) + b"\n"


def open_writer(folder, output_format="jsonl", num_rows=3, sync_interval_s=0.0):
    return ResultWriter(folder, output_format, num_rows, sync_interval_s, lambda outcome: None)


def write(output, output_format, rows, restart=False):
    folder = JobFolder(output, restart)
    folder.settle(MANIFEST)
    writer = open_writer(folder, output_format)
    for row in rows:
        writer.commit(Outcome(row), line_of(row))
    if len(writer) == 3:
        writer.finish()
    writer.close()
    folder.close()
    return writer


def test_rows_are_written_as_they_come_and_late_duplicates_are_dropped(tmp_path):
    writer = write(tmp_path / "out.jsonl", "jsonl", [2, 0, 2, 1, 0])
    assert writer.num_duplicates == 2
    assert (tmp_path / "out.jsonl").read_bytes() == line_of(2) + line_of(0) + line_of(1)


def test_ordered_output_appears_whole_and_in_order(tmp_path):
    output = tmp_path / "out.jsonl"
    write(output, "ordered jsonl", [2, 0])
    assert not output.exists()
    write(output, "ordered jsonl", [1])
    assert output.read_bytes() == line_of(0) + line_of(1) + line_of(2)


def test_parquet_has_the_same_columns_with_and_without_errors(tmp_path):
    output = tmp_path / "out.parquet"
    write(output, "parquet", [1, 2, 0])
    table = pyarrow.parquet.read_table(output)
    assert table.column("custom_id").to_pylist() == ["id-0", "id-1", "id-2"]
    assert {str(f.type) for f in table.schema} == {"string", "int32"}
    assert table.column("error_code").to_pylist() == [None] * 3


@pytest.mark.parametrize(
    ("name", "ordered", "expected"), [("a.jsonl", False, 0), ("a.ndjson", True, 1), ("a.pq", 1, 2)]
)
def test_format_follows_the_suffix(tmp_path, name, ordered, expected):
    assert format_of(tmp_path / name, ordered) == FORMATS[expected]


def test_unknown_suffix_is_refused(tmp_path):
    with pytest.raises(BatchError, match="must end in .jsonl"):
        format_of(tmp_path / "out.csv", False)


def test_everything_is_private_whatever_the_umask(tmp_path):
    mask = os.umask(0)
    try:
        write(tmp_path / "out.jsonl", "jsonl", [0, 1, 2])
        write(tmp_path / "ordered.jsonl", "ordered jsonl", [0, 1, 2])
        write(tmp_path / "new" / "out.parquet", "parquet", [0, 1, 2])
    finally:
        os.umask(mask)
    modes = {
        str(path.relative_to(tmp_path)): oct(path.stat().st_mode & 0o777)
        for path in tmp_path.rglob("*")
    }
    assert set(modes.values()) == {"0o600", "0o700"}
    folders = {name for name, mode in modes.items() if mode == "0o700"}
    assert folders == {"out.jsonl.job", "ordered.jsonl.job", "new", "new/out.parquet.job"}


def test_changed_manifest_is_refused_and_restart_overrides(tmp_path):
    write(tmp_path / "out.jsonl", "jsonl", [0])
    folder = JobFolder(tmp_path / "out.jsonl")
    changed = replace(MANIFEST, parameters={"max_tokens": 9, "stop": ["a"]})
    with pytest.raises(BatchError, match=r"another job \(max_tokens: 4 -> 9\); give the same"):
        folder.settle(changed)
    folder.settle(MANIFEST)
    folder.close()
    restarted = JobFolder(tmp_path / "out.jsonl", restart=True)
    assert (tmp_path / "out.jsonl").exists()
    restarted.settle(changed)
    assert not (tmp_path / "out.jsonl").exists()
    restarted.close()


@pytest.mark.parametrize("content", [b"", b"\xff", b"[]", b"{}", b'{"parameters": 1}'])
def test_damaged_manifest_is_refused(tmp_path, content):
    write(tmp_path / "out.jsonl", "jsonl", [0])
    (tmp_path / "out.jsonl.job" / "manifest.json").write_bytes(content)
    with pytest.raises(BatchError, match="manifest.json is damaged .*; use --restart"):
        write(tmp_path / "out.jsonl", "jsonl", [1])


def test_output_of_something_else_is_not_overwritten(tmp_path):
    output = tmp_path / "out.jsonl"
    output.write_text("mine\n")
    with pytest.raises(BatchError, match="belongs to no job; choose another name, or --restart"):
        JobFolder(output)
    assert output.read_text() == "mine\n"
    write(output, "jsonl", [0], restart=True)
    assert output.read_bytes() == line_of(0)


def test_one_process_at_a_time(tmp_path):
    folder = JobFolder(tmp_path / "out.jsonl")
    with pytest.raises(BatchError, match="another process is running the job"):
        JobFolder(tmp_path / "out.jsonl")
    folder.close()


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("file/out.jsonl", "Not a directory"),
        ("link.jsonl", "is a link"),
        ("folder", "is not a regular file"),
        ("http://host/out.jsonl", "must be a path of a local file"),
        ("nul\0.jsonl", "must be a path of a local file"),
    ],
)
def test_unwritable_outputs(tmp_path, name, part):
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "target")
    with pytest.raises(BatchError, match=part):
        JobFolder(tmp_path.__class__(name) if "://" in name else tmp_path / name)
    assert not (tmp_path / "target").exists()


def test_device_is_refused():
    from pathlib import Path

    with pytest.raises(BatchError, match="/dev/full is not a regular file"):
        JobFolder(Path("/dev/full"))


@pytest.fixture
def file_size_limit():
    """A full disk that needs no privileges: no file may grow beyond the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda num_bytes: resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("limit", [1, 20, 130, 150, 200, 260])
def test_full_disk_keeps_whole_lines_and_the_job_can_go_on(tmp_path, file_size_limit, limit):
    output = tmp_path / "out.jsonl"
    folder = JobFolder(output)
    folder.settle(MANIFEST)
    writer = open_writer(folder)
    file_size_limit(limit)
    committed = 0
    with pytest.raises(BatchError, match=f"cannot write output {output} or its journal: File too"):
        for committed in range(3):
            writer.commit(Outcome(committed), line_of(committed))
    writer.close()
    folder.close()
    file_size_limit(resource.RLIM_INFINITY)
    content = output.read_bytes()
    assert content in (b"".join(map(line_of, range(n))) for n in (committed, committed + 1))
    write(output, "jsonl", range(3))
    assert output.read_bytes() == b"".join(map(line_of, range(3)))


def test_full_disk_while_the_ordered_output_is_put_together(tmp_path, file_size_limit):
    output = tmp_path / "out.jsonl"
    folder = JobFolder(output)
    folder.settle(MANIFEST)
    writer = open_writer(folder, "ordered jsonl", sync_interval_s=99)
    for row in (2, 1, 0):
        writer.commit(Outcome(row), line_of(row))
    file_size_limit(200)
    with pytest.raises(BatchError, match="3 rows are safe"):
        writer.finish()
    writer.close()
    folder.close()
    file_size_limit(resource.RLIM_INFINITY)
    assert not output.exists()
    assert {p.name for p in folder.path.iterdir()} == {
        "journal.jsonl", "lock", "manifest.json", "results.jsonl",
    }  # fmt: skip
    write(output, "ordered jsonl", [])
    assert output.read_bytes() == b"".join(map(line_of, range(3)))

from __future__ import annotations

import os
import tracemalloc

import dask.bag
import distributed
import numpy as np
import pandas as pd
import pytest

from daskserve.batch.prompts import prompt_of
from daskserve.batch.scan import scan
from daskserve.batch.sources import JsonlFile, open_source
from daskserve.core.params import SamplingParams
from daskserve.errors import BatchError, RequestError


def rows_of(source, folder, max_line_bytes=2**20):
    return list(open_source(source, folder / "input.jsonl", max_line_bytes).rows())


def prompts_of(source, folder):
    rows = rows_of(source, folder)
    return [(r.custom_id, prompt_of(r, SamplingParams(), "m")[0]) for r in rows]


def test_jsonl_rows_are_named_by_line_and_blank_lines_are_no_rows(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n\n  \n{"custom_id": "x", "prompt": "b"}')
    assert prompts_of(path, tmp_path) == [("line-1", "a"), ("x", "b")]
    assert [r.number for r in rows_of(path, tmp_path)] == [0, 1]


def test_over_long_line_is_one_bad_row_and_is_not_read_into_memory(tmp_path):
    path = tmp_path / "in.jsonl"
    with path.open("wb") as file:
        file.write(b'{"prompt": "a"}\n{"prompt": "')
        for _ in range(40):
            file.write(b"x" * 2**20)
        file.write(b'"}\n{"prompt": "b"}\n')
    tracemalloc.start()
    rows = rows_of(path, tmp_path, max_line_bytes=4096)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert [r.custom_id for r in rows] == ["line-1", "line-2", "line-3"]
    assert "longer than 4096 bytes" in rows[1].problem
    assert peak < 4 * 2**20


def test_line_of_exactly_the_limit_is_read(tmp_path):
    path = tmp_path / "in.jsonl"
    line = b'{"prompt": "' + b"x" * (64 - 14) + b'"}'
    path.write_bytes(line + b"\n" + line)
    assert [r.problem for r in rows_of(path, tmp_path, max_line_bytes=64)] == [None, None]


def test_dask_bag_of_strings_and_mappings(tmp_path):
    bag = dask.bag.from_sequence(["a", {"prompt": "b", "custom_id": 7}, {"prompt": "c"}], 2)
    expected = [("row-0", "a"), ("7", "b"), ("row-2", "c")]
    assert prompts_of(bag, tmp_path) == expected
    assert prompts_of(bag.repartition(1), tmp_path) == expected


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_data_frame_rows_do_not_depend_on_partitions(tmp_path):
    import dask.dataframe

    frame = pd.DataFrame(
        {"prompt": [f"p{i}" for i in range(10)], "other": range(10), "max_tokens": [5.0] * 10}
    ).astype({"max_tokens": "Int64"})
    frame.loc[3, "max_tokens"] = pd.NA
    frame["prompt"] = frame["prompt"].astype(object)
    few, many = (dask.dataframe.from_pandas(frame, npartitions=n) for n in (2, 5))
    assert prompts_of(few, tmp_path) == [(f"row-{i}", f"p{i}") for i in range(10)]
    hashes = {scan(open_source(f, tmp_path / "input.jsonl", 2**20)).sha256 for f in (few, many)}
    assert len(hashes) == 1
    rows = rows_of(few, tmp_path)
    assert [prompt_of(r, SamplingParams(), "m")[1].max_tokens for r in rows[2:4]] == [5, 128]


def test_persisted_collections_are_read_where_they_lie(tmp_path):
    import dask.dataframe

    frame = dask.dataframe.from_pandas(pd.DataFrame({"prompt": ["a", "b"], "x": [1, 2]}), 2)
    with distributed.Client(processes=False, n_workers=1, dashboard_address=None) as client:
        held = client.persist(frame)
        held_bag = client.persist(dask.bag.from_sequence(["a", "b"], 2))
        expected = [("row-0", "a"), ("row-1", "b")]
        assert prompts_of(held, tmp_path) == prompts_of(held_bag, tmp_path) == expected


def test_parquet_file_and_folder(tmp_path):
    frame = pd.DataFrame({"custom_id": ["a", "b"], "prompt": ["x", None], "label": [1, 2]})
    frame.to_parquet(tmp_path / "one.parquet")
    messages = pd.DataFrame({"messages": [[{"role": "user", "content": "hi"}]]})
    messages.to_parquet(tmp_path / "two.parquet")
    rows = rows_of(tmp_path, tmp_path)
    assert [r.custom_id for r in rows] == ["a", "b", "row-2"]
    assert prompt_of(rows[2], SamplingParams(), "m")[0] == [{"role": "user", "content": "hi"}]
    with pytest.raises(RequestError, match="prompt is missing"):
        prompt_of(rows[1], SamplingParams(), "m")


def test_odd_cells_become_bad_rows(tmp_path):
    cells = [{"prompt": np.array([1, 2])}, {"prompt": pd.Timestamp(0)}, {"prompt": "\ud800"}, 7]
    rows = rows_of(iter(cells), tmp_path)
    assert prompt_of(rows[0], SamplingParams(), "m")[0] == [1, 2]
    for row in rows[1:]:
        with pytest.raises(RequestError):
            prompt_of(row, SamplingParams(), "m")


@pytest.mark.parametrize(
    ("name", "content", "part"),
    [
        ("none.jsonl", None, "No such file"),
        ("in.csv", b"a,b", "must end in one of .jsonl"),
        ("in.jsonl", b"\x1f\x8b\x08", "gzip-compressed; unpack it first"),
        ("in.jsonl", "{}".encode("utf-16"), "is UTF-16; convert it first"),
        ("in.parquet", b"PAR1", "cannot read parquet file"),
    ],
)
def test_unusable_input_files(tmp_path, name, content, part):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(BatchError, match=part):
        rows_of(tmp_path / name, tmp_path)


@pytest.mark.parametrize(
    ("source", "part"),
    [
        ("http://host/in.jsonl", "is a URL"),
        ("/dev/null", "not a regular file"),
        ("a\0.jsonl", "cannot read input"),
        (7, "cannot read rows from int"),
        (b"x", "cannot read rows from bytes"),
    ],
)
def test_unusable_sources(tmp_path, source, part):
    with pytest.raises(BatchError, match=part):
        rows_of(source, tmp_path)


def test_table_without_prompts_names_its_columns(tmp_path):
    pd.DataFrame({"text": ["a"]}).to_parquet(tmp_path / "in.parquet")
    with pytest.raises(BatchError, match="needs a column prompt or messages; it has text"):
        rows_of(tmp_path / "in.parquet", tmp_path)


def test_spooled_rows_are_private(tmp_path):
    mask = os.umask(0)
    try:
        open_source(["a"], tmp_path / "input.jsonl", 2**20)
    finally:
        os.umask(mask)
    assert (tmp_path / "input.jsonl").stat().st_mode & 0o777 == 0o600


def test_repeated_id_names_both_lines(tmp_path):
    path = tmp_path / "in.jsonl"
    lines = [f'{{"custom_id": "id-{i % 700}", "prompt": "p"}}' for i in range(701)]
    path.write_text("\n".join(["", *lines]))
    with pytest.raises(BatchError, match="'id-0' is used twice, on line 2 and on line 702;"):
        scan(JsonlFile(path, 2**20))


def test_given_id_may_not_equal_a_default_one(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": "b", "custom_id": "line-1"}\n')
    with pytest.raises(BatchError, match="on line 1 and on line 2"):
        scan(JsonlFile(path, 2**20))


def test_scan_counts_hashes_and_finds_the_form(tmp_path):
    path = tmp_path / "in.jsonl"
    body = b'{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {}}\n'
    path.write_bytes(b"{\n" + body)
    found = scan(JsonlFile(path, 2**20))
    assert (found.num_rows, found.form) == (2, "completion")
    assert found.sha256 != scan_of(tmp_path, body).sha256
    assert scan_of(tmp_path, b"").num_rows == 0


def scan_of(folder, content):
    (folder / "other.jsonl").write_bytes(content)
    return scan(JsonlFile(folder / "other.jsonl", 2**20))

"""Laws of the journal: whatever a crash leaves behind, a resume ends in the same lines."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daskserve.batch.journal import Journal, RowSet
from daskserve.batch.outcome import Outcome
from daskserve.core.request import Timeline
from daskserve.errors import BatchError

NUM_ROWS = 6
LINES = [f'{{"row": {i}, "text": "{"x" * i}"}}\n'.encode() for i in range(NUM_ROWS)]


def outcome_of(row):
    if row % 3 == 2:
        return Outcome.failure(row, f"id-{row}", "invalid_row", "why")
    return Outcome(row, 5, row + 1, Timeline(0.1, 0.2, 0.3, 0.4, 0.5, row))


def open_journal(folder, seen=None):
    on_outcome = (lambda outcome: None) if seen is None else seen.append
    return Journal(folder / "journal", folder / "results", NUM_ROWS, on_outcome)


def write_missing(folder, order, sync_after=()):
    journal = open_journal(folder)
    for row in order:
        if row not in journal.written:
            journal.append(outcome_of(row), LINES[row])
            if row in sync_after:
                journal.sync()
    journal.close()


def truncate(path, share):
    content = path.read_bytes()
    path.write_bytes(content[: round(share * len(content))])


@settings(max_examples=150, deadline=None)
@given(
    order=st.permutations(range(NUM_ROWS)),
    written=st.integers(0, NUM_ROWS),
    synced=st.sets(st.integers(0, NUM_ROWS - 1)),
    journal_share=st.floats(0, 1),
    results_share=st.floats(0, 1),
)
def test_any_truncation_of_both_files_resumes_to_the_same_lines(
    tmp_path_factory, order, written, synced, journal_share, results_share
):
    folder = tmp_path_factory.mktemp("job")
    write_missing(folder, order[:written], synced)
    truncate(folder / "journal", journal_share)
    truncate(folder / "results", results_share)
    write_missing(folder, order)
    content = (folder / "results").read_bytes()
    assert sorted(content.splitlines(keepends=True)) == sorted(LINES)
    seen = []
    journal = open_journal(folder, seen)
    assert sorted(seen, key=lambda o: o.row) == [outcome_of(row) for row in range(NUM_ROWS)]
    extents = journal.extents()
    journal.close()
    assert [content[start:end] for start, end in extents] == LINES


@settings(max_examples=60, deadline=None)
@given(order=st.permutations(range(NUM_ROWS)), garbage=st.binary(min_size=1, max_size=40))
def test_garbage_after_the_last_record_is_cut(tmp_path_factory, order, garbage):
    folder = tmp_path_factory.mktemp("job")
    write_missing(folder, order[:3], {order[2]})
    for name in ("journal", "results"):
        with (folder / name).open("ab") as file:
            file.write(garbage)
    write_missing(folder, order)
    lines = (folder / "results").read_bytes().splitlines(keepends=True)
    assert sorted(lines) == sorted(LINES)


def test_rows_before_the_cut_are_kept(tmp_path):
    write_missing(tmp_path, range(4))
    truncate(tmp_path / "results", 0.99)
    journal = open_journal(tmp_path)
    assert [row in journal.written for row in range(NUM_ROWS)] == [True] * 3 + [False] * 3
    journal.close()


def test_unsynced_lines_spoiled_by_a_power_cut_are_written_again(tmp_path):
    write_missing(tmp_path, range(4), sync_after={1})
    content = (tmp_path / "results").read_bytes()
    (tmp_path / "results").write_bytes(content[:-10] + b"\0" * 10)
    journal = open_journal(tmp_path)
    assert len(journal.written) == 3
    journal.close()


def test_synced_lines_changed_by_someone_stop_the_job_and_stay_untouched(tmp_path):
    write_missing(tmp_path, range(4), sync_after={3})
    changed = (tmp_path / "results").read_bytes().replace(b'"row": 1', b'"row": 9')
    (tmp_path / "results").write_bytes(changed)
    with pytest.raises(BatchError, match="was changed after byte 23 since"):
        open_journal(tmp_path)
    assert (tmp_path / "results").read_bytes() == changed


def test_a_row_recorded_twice_counts_once(tmp_path):
    write_missing(tmp_path, [0])
    journal = (tmp_path / "journal").read_bytes()
    results = (tmp_path / "results").read_bytes()
    end, rest = journal[1:].split(b",", 1)
    (tmp_path / "journal").write_bytes(journal + b"[%d,%s" % (2 * int(end), rest))
    (tmp_path / "results").write_bytes(results * 2)
    open_journal(tmp_path).close()
    assert (tmp_path / "results").read_bytes() == results


@given(st.sets(st.integers(0, 99)))
def test_row_set_is_a_set(rows):
    mine = RowSet(100)
    for row in rows:
        mine.add(row)
        mine.add(row)
    assert len(mine) == len(rows)
    assert {row for row in range(100) if row in mine} == rows
    for row in (-1, 100):
        with pytest.raises(ValueError, match="not one of 100"):
            mine.add(row)

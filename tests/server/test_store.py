from __future__ import annotations

import os

import pytest

from daskserve.errors import ConfigError
from daskserve.server.store import Store


def add(store, data=b"x\n", name="in.jsonl"):
    return store.add_file(lambda target: target.write(data), name, "batch")


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "state", keep_s=100)


def test_a_file_comes_back_as_it_was(store):
    record = add(store, b"\x00\xff\n")
    assert store.content(record["id"]).read_bytes() == b"\x00\xff\n"
    assert store.file(record["id"]) == record and store.files() == [record]
    assert (record["bytes"], store.stored_bytes()) == (3, 3)


def test_a_writer_that_fails_leaves_nothing(store, tmp_path):
    def fail(target):
        target.write(b"half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        store.add_file(fail, "x", "batch")
    assert store.files() == []
    assert not [path for path in (tmp_path / "state").rglob("*") if path.is_file()]


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "file-../../x", "file-" + "A" * 32, "\0"])
def test_only_ids_of_our_form_are_looked_up(store, name):
    assert store.file(name) is None and store.batch(name) is None


def test_one_process_works_and_the_next_takes_over(store):
    first = store.lock()
    assert first is not None and store.lock() is None
    os.close(first)
    second = store.lock()
    assert second is not None
    os.close(second)


def test_what_is_too_old_goes_but_for_open_batches(store):
    file = add(store)
    given = {"created_at": file["created_at"], "status": "in_progress"}
    batch = store.add_batch(given, file["id"])
    ended = store.add_batch(given | {"status": "completed"}, file["id"])
    (store.content(file["id"]).parents[1] / "scratch" / "left").write_bytes(b"x")
    store.sweep(file["created_at"] + 50, ["in_progress"])
    assert store.files() == [file] and len(store.batches()) == 2
    store.sweep(file["created_at"] + 200, ["in_progress"])
    assert store.files() == [] and store.batches() == [batch]
    assert (store.batch_folder(batch["id"]) / "input.jsonl").read_bytes() == b"x\n"
    assert not store.batch_folder(ended["id"]).exists()


def test_a_folder_that_is_a_link_is_refused(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "state").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="is a link"):
        Store(tmp_path / "state", keep_s=100)


def test_a_record_that_is_damaged_is_skipped(store, tmp_path):
    file = add(store)
    (tmp_path / "state" / "files" / f"{file['id']}.json").write_bytes(b"{")
    assert store.files() == [] and store.file(file["id"]) is None

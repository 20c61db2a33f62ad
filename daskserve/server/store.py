"""Files and batches on disk: records that survive a restart, in folders for the owner alone.

Ids are random and of one form, so that no path can be asked for; names that callers give are
kept as text. Several server processes may share a folder: files are complete when they appear,
and the record of a batch is written by the one process that works on batches.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import orjson

from daskserve.batch.folder import PRIVATE_FOLDER, make_folders, open_private, replacing
from daskserve.errors import ConfigError

_FILE_ID = re.compile(r"file-[0-9a-f]{32}")
_BATCH_ID = re.compile(r"batch_[0-9a-f]{32}")

Record = dict[str, Any]


class Store:
    """The state folder of servers.

    Parameters
    ----------
    folder
        Made if it is not there, mode 0700 (ConfigError).
    keep_s
        Files, and batches that have ended, are deleted by `sweep` when they are so old.
    """

    def __init__(self, folder: Path, keep_s: float) -> None:
        self._keep_s = keep_s
        self._files, self._batches = folder / "files", folder / "batches"
        self._scratch, self._lock_path = folder / "scratch", folder / "worker.lock"
        try:
            for path in (folder, self._files, self._batches, self._scratch):
                make_folders(path)
                if not stat.S_ISDIR(path.lstat().st_mode):
                    raise ConfigError(f"{path} is a link; remove it")
                path.chmod(PRIVATE_FOLDER)
        except OSError as error:
            raise ConfigError(f"cannot keep state in {folder}: {error.strerror}") from None

    def lock(self) -> int | None:
        """The right to work on batches, a descriptor to close; None while another process works."""
        descriptor = open_private(self._lock_path)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        return descriptor

    # Files.

    def add_file(self, write: Callable[[Any], None], filename: str, purpose: str) -> Record:
        """Keep what ``write`` puts into a binary file; its record."""
        file_id = f"file-{secrets.token_hex(16)}"
        content = self.content(file_id)
        with replacing(content, self._scratch) as temporary, temporary.open("wb") as target:
            write(target)
            target.flush()
        now = time.time()
        record = {
            "id": file_id,
            "object": "file",
            "bytes": content.stat().st_size,
            "created_at": int(now),
            "expires_at": int(now + self._keep_s),
            "filename": filename,
            "purpose": purpose,
            "status": "processed",
        }
        self._write(self._files / f"{file_id}.json", record)
        return record

    def file(self, file_id: str) -> Record | None:
        return self._read(self._files / f"{file_id}.json") if _FILE_ID.fullmatch(file_id) else None

    def files(self) -> list[Record]:
        """All, the oldest first."""
        return _in_order(self._read(path) for path in self._files.glob("file-*.json"))

    def content(self, file_id: str) -> Path:
        """Where the bytes of a file lie; the id must be one that `file` knows."""
        return self._files / f"{file_id}.jsonl"

    def delete_file(self, file_id: str) -> None:
        """A batch that reads the file keeps it by a link of its own."""
        (self._files / f"{file_id}.json").unlink(missing_ok=True)
        self.content(file_id).unlink(missing_ok=True)

    def stored_bytes(self) -> int:
        return sum(record["bytes"] for record in self.files())

    # Batches.

    def add_batch(self, record: Record, input_file_id: str) -> Record:
        """A new batch over a file; nobody sees half of it."""
        batch_id = f"batch_{secrets.token_hex(16)}"
        record = {"id": batch_id, **record}
        folder = self._scratch / batch_id
        folder.mkdir(PRIVATE_FOLDER)
        try:
            os.link(self.content(input_file_id), folder / "input.jsonl")
            self._write(folder / "record.json", record)
            folder.rename(self._batches / batch_id)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        return record

    def batch(self, batch_id: str) -> Record | None:
        if not _BATCH_ID.fullmatch(batch_id):
            return None
        return self._read(self._batches / batch_id / "record.json")

    def batches(self) -> list[Record]:
        """All, the oldest first."""
        return _in_order(self._read(path) for path in self._batches.glob("batch_*/record.json"))

    def write_batch(self, record: Record) -> None:
        """For the process that holds the lock."""
        self._write(self.batch_folder(record["id"]) / "record.json", record)

    def batch_folder(self, batch_id: str) -> Path:
        """Input, output and job of a batch that is known."""
        return self._batches / batch_id

    def tidy_batch(self, batch_id: str) -> None:
        """Of a batch that has ended only the record is kept; its results are files now."""
        folder = self.batch_folder(batch_id)
        for name in ("input.jsonl", "output.jsonl"):
            (folder / name).unlink(missing_ok=True)
        shutil.rmtree(folder / "output.jsonl.job", ignore_errors=True)

    def sweep(self, now: float, open_states: Collection[str]) -> None:
        """Delete what is too old; for the process that holds the lock.

        Parameters
        ----------
        now
            Seconds since the epoch.
        open_states
            Batches in these are kept, however old.
        """
        for record in self.files():
            if record["expires_at"] <= now:
                self.delete_file(record["id"])
        for record in self.batches():
            if record["status"] not in open_states and record["created_at"] + self._keep_s <= now:
                shutil.rmtree(self.batch_folder(record["id"]), ignore_errors=True)
        for path in self._scratch.iterdir():  # left by a process that was killed
            if path.stat().st_mtime + self._keep_s <= now:
                shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)

    def ask_to_cancel(self, batch_id: str) -> None:
        """From any process; the one that works on batches sees it."""
        marker = self.batch_folder(batch_id) / "cancel"
        if not marker.exists():
            descriptor = open_private(marker)
            os.close(descriptor)

    def asked_to_cancel_at(self, batch_id: str) -> int | None:
        try:
            return int((self.batch_folder(batch_id) / "cancel").stat().st_mtime)
        except FileNotFoundError:
            return None

    def _write(self, path: Path, record: Record) -> None:
        with replacing(path, self._scratch) as temporary:
            temporary.write_bytes(orjson.dumps(record))

    def _read(self, path: Path) -> Record | None:
        try:
            record: Record = orjson.loads(path.read_bytes())
        except (FileNotFoundError, orjson.JSONDecodeError):
            return None
        return record


def _in_order(records: Any) -> list[Record]:
    found = [record for record in records if record is not None]
    return sorted(found, key=lambda record: (record["created_at"], record["id"]))

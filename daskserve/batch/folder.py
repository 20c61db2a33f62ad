"""The folder of one job, beside its output: manifest, journal, lock. Mode 0700, files 0600."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import orjson

from daskserve.batch.manifest import Manifest
from daskserve.errors import BatchError

PRIVATE_FILE = 0o600
PRIVATE_FOLDER = 0o700


def open_private(path: Path) -> int:
    """A descriptor to read and append; the file is the owner's alone and no link is followed."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, PRIVATE_FILE)
    os.fchmod(descriptor, PRIVATE_FILE)  # whatever the umask
    return descriptor


@contextmanager
def replacing(path: Path, scratch: Path) -> Iterator[Path]:
    """A temporary file in ``scratch`` that takes the place of ``path`` once it is complete."""
    descriptor, name = tempfile.mkstemp(dir=scratch)  # unpredictable name, mode 0600
    try:
        yield Path(name)
        os.fsync(descriptor)
        os.replace(name, path)
        sync_folder(path.parent)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)


def sync_folder(folder: Path) -> None:
    """Make a rename or a new file in the folder survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class JobFolder:
    """``<output>.job``, held by one process at a time.

    Parameters
    ----------
    output
        Where the job's result goes.
    restart
        Have `settle` forget an earlier job with this output, and its output.

    Raises
    ------
    BatchError
        The output cannot be written there, belongs to something else, or another process has
        the job.
    """

    def __init__(self, output: Path, restart: bool = False) -> None:
        self.output = output
        self.path = output.with_name(output.name + ".job")
        self.journal = self.path / "journal.jsonl"
        self.results = self.path / "results.jsonl"
        self.spool = self.path / "input.jsonl"
        self._manifest = self.path / "manifest.json"
        self._summary = self.path / "summary.json"
        _check_output(output)
        try:
            make_folders(output.parent)
            self.path.mkdir(PRIVATE_FOLDER, exist_ok=True)
            if not stat.S_ISDIR(self.path.lstat().st_mode):
                raise BatchError(f"{self.path} is a link; remove it")
            self.path.chmod(PRIVATE_FOLDER)
            self._lock = self._take_lock()
        except OSError as error:
            raise BatchError(f"cannot write output {output}: {error.strerror}") from None
        self._restart = restart
        if not restart and not self._manifest.exists() and _size_of(output):
            self.close()
            raise BatchError(
                f"output {output} exists and belongs to no job; choose another name, or "
                "--restart to overwrite it"
            )

    def _take_lock(self) -> int:
        lock = open_private(self.path / "lock")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            raise BatchError(f"another process is running the job {self.path}") from None
        return lock

    def settle(self, manifest: Manifest) -> None:
        """Compare with the stored manifest, or store this one for a new job."""
        if self._restart:
            for path in (self.output, self.journal, self.results, self._summary, self._manifest):
                path.unlink(missing_ok=True)
        if self._manifest.exists():
            try:
                changed = manifest.differences(orjson.loads(self._manifest.read_bytes()))
            except (OSError, ValueError) as error:
                raise BatchError(f"{self._manifest} is damaged ({error}); use --restart") from None
            if changed:
                raise BatchError(
                    f"{self.path} holds another job ({'; '.join(changed)}); give the same input "
                    "and parameters to resume it, or --restart to begin anew"
                )
        else:
            self._write(self._manifest, asdict(manifest))

    def write_summary(self, record: dict[str, Any]) -> None:
        """Mark the job as complete."""
        self._write(self._summary, {**record, "output_bytes": self.output.stat().st_size})

    def read_summary(self) -> dict[str, Any] | None:
        """The summary of a complete job whose output is still there, else None."""
        try:
            record = orjson.loads(self._summary.read_bytes())
            if record["output_bytes"] == self.output.stat().st_size:
                return record
        except (OSError, ValueError, TypeError, KeyError):
            pass  # none, or damaged: the journal knows as much
        self._summary.unlink(missing_ok=True)
        return None

    def _write(self, path: Path, record: dict[str, Any]) -> None:
        try:
            with replacing(path, self.path) as temporary:
                temporary.write_bytes(orjson.dumps(record, option=orjson.OPT_INDENT_2))
        except OSError as error:
            raise BatchError(
                f"cannot write {path}: {error.strerror}; run the same command again to go on"
            ) from None

    def close(self) -> None:
        """Give up the lock; the folder of a job that never began goes away."""
        if not self._manifest.exists():
            shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def is_url(path: str) -> bool:
    """``scheme://...``, also after pathlib has made one slash of the two."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", path) is not None


def is_same_file(one: str | Path, other: str | Path) -> bool:
    """Both paths lead to one existing file."""
    try:
        return os.path.samefile(one, other)
    except (OSError, ValueError):
        return False


def _size_of(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def make_folders(folder: Path) -> None:
    """The owner's alone; Path.mkdir gives the folders above the last one the umask's mode."""
    if not folder.is_dir():
        make_folders(folder.parent)
        folder.mkdir(PRIVATE_FOLDER)


def _check_output(output: Path) -> None:
    text = os.fspath(output)
    if is_url(text) or "\0" in text:
        raise BatchError(f"output {text!r} must be a path of a local file")
    try:
        mode = output.lstat().st_mode
    except FileNotFoundError:
        return
    except OSError as error:
        raise BatchError(f"cannot write output {output}: {error.strerror}") from None
    if stat.S_ISLNK(mode):
        raise BatchError(f"output {output} is a link; give the path of the file itself")
    if not stat.S_ISREG(mode):
        raise BatchError(f"output {output} is not a regular file")

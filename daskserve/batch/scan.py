"""The first pass over a job's rows: how many, their hash, their form, no id twice."""

from __future__ import annotations

import hashlib
import secrets
from array import array
from dataclasses import dataclass

import numpy as np

from daskserve.batch.lines import Form
from daskserve.batch.sources import JsonlFile
from daskserve.errors import BatchError


@dataclass(frozen=True, slots=True)
class Scan:
    """What the first pass found; ``form`` is that of the first row that shows one."""

    num_rows: int
    sha256: str
    form: Form


def scan(file: JsonlFile) -> Scan:
    """Read all rows once. Memory: 24 bytes per row, for the hashes of the ids and their order.

    Raises
    ------
    BatchError
        The file cannot be read, or two rows have one id; both are named.
    """
    digest = hashlib.sha256()
    # Keyed, so that no file can be made whose ids collide on purpose.
    key = secrets.token_bytes(16)
    hashes = array("Q")
    form = None
    try:
        for row in file.rows(digest=digest):
            hashes.append(_hash_of(row.custom_id, key))
            if form is None and row.problem is None:
                form = row.form
        _check_unique(file, np.frombuffer(hashes, dtype=np.uint64))
    except OSError as error:
        raise BatchError(f"cannot read input {file.path}: {error.strerror}") from None
    return Scan(len(hashes), digest.hexdigest(), form or Form.PLAIN)


def _hash_of(custom_id: str, key: bytes) -> int:
    name = hashlib.blake2b(custom_id.encode(), digest_size=8, key=key)
    return int.from_bytes(name.digest(), "little")


def _check_unique(file: JsonlFile, hashes: np.ndarray) -> None:
    order = np.argsort(hashes, kind="stable")
    ordered = hashes[order]
    repeats = ordered[1:][ordered[1:] == ordered[:-1]]
    if not repeats.size:
        return
    suspects = set(np.flatnonzero(np.isin(hashes, np.unique(repeats))).tolist())
    first_at: dict[str, int] = {}
    for row in file.rows():
        if row.number not in suspects:
            continue
        if row.custom_id in first_at:
            first, second = file.name_of(first_at[row.custom_id]), file.name_of(row.number)
            raise BatchError(
                f"custom_id {row.custom_id!r} is used twice, on {first} and on {second}; "
                "every row needs its own"
            )
        first_at[row.custom_id] = row.number

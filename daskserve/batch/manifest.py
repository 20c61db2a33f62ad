"""What makes two runs the same job: input, model, parameters and output format."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import orjson


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a job is: two runs with equal manifests write the same rows.

    Parameters
    ----------
    input_sha256, num_rows
        Of the input file, or of the rows of a table in their order.
    model, model_sha256, dtype
        What answers the rows; see `daskserve.models.identity`.
    parameters
        The job's default sampling parameters.
    output_format
        ``jsonl``, ``ordered jsonl`` or ``parquet``.
    """

    input_sha256: str
    num_rows: int
    model: str
    model_sha256: str
    dtype: str
    parameters: dict[str, Any]
    output_format: str

    def differences(self, other: Any) -> list[str]:
        """``name: then -> now`` for all that differs from a stored manifest (ValueError)."""
        if not isinstance(other, dict) or not isinstance(other.get("parameters"), dict):
            raise ValueError("not a manifest")
        mine = _flat(asdict(self))
        theirs = _flat(other)
        names = sorted(mine.keys() | theirs.keys())
        return [
            f"{name}: {theirs.get(name)!r} -> {mine.get(name)!r}"
            for name in names
            if mine.get(name) != theirs.get(name)
        ]


def _flat(record: dict[str, Any]) -> dict[str, Any]:
    flat = orjson.loads(orjson.dumps(record))  # tuples as they come back from the file
    parameters = flat.pop("parameters")
    return {**flat, **parameters}

"""The reference for decoding: the tokenizers library itself, on the same files."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def full_decode():
    return lambda tokenizer, ids: tokenizer._plain.decode(ids, skip_special_tokens=True)

"""Text to token ids and back: tokenizer, chat template, incremental detokenisation. No torch."""

from __future__ import annotations

from daskserve.text.detokenizer import Detokenizer
from daskserve.text.tokenizer import Tokenizer

__all__ = ["Detokenizer", "Tokenizer"]

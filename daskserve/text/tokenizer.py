"""Prompts and chats to token ids, and back, from the files of a model directory."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as RustTokenizer

from daskserve.errors import ContextOverflow, InvalidParameter, ModelError
from daskserve.models.config import ModelConfig
from daskserve.text.chat import ChatTemplate
from daskserve.text.detokenizer import Detokenizer
from daskserve.text.messages import checked_messages, checked_text
from daskserve.text.pieces import TokenPieces


class Tokenizer:
    """The tokenizer of one model. Safe to use from several threads.

    ``load`` is the way to get one. Text from outside never becomes a special token: only the
    chat template and the tokenizer's own additions (such as a beginning-of-sequence token) do.
    """

    def __init__(self, model_dir: Path) -> None:
        path = model_dir / "tokenizer.json"
        try:
            definition = path.read_text(encoding="utf-8")
            self._plain = RustTokenizer.from_str(definition)
            self._with_special = RustTokenizer.from_str(definition)
        except Exception as error:  # the library raises bare Exception
            raise ModelError(f"cannot read {path}: {error}") from error
        self._plain.encode_special_tokens = True
        for rust in (self._plain, self._with_special):
            rust.no_truncation()
            rust.no_padding()
        added = self._plain.get_added_tokens_decoder()
        special = {token_id: token.content for token_id, token in added.items() if token.special}
        self._template = ChatTemplate.load(model_dir, special.values())
        self._model = ModelConfig.load(model_dir)
        self.pieces = TokenPieces(
            self._plain.id_to_token, frozenset(special), json.loads(definition).get("decoder")
        )
        self._max_token_chars = max(map(len, self._plain.get_vocab()), default=1)

    @classmethod
    def load(cls, model_dir: Path) -> Tokenizer:
        """Read the tokenizer of a directory that ``daskserve.models.resolve`` gave (ModelError)."""
        return cls(model_dir)

    @property
    def vocab_size(self) -> int:
        """Rows of the model's embedding: ids are below it."""
        return self._model.vocab_size

    @property
    def context_tokens(self) -> int:
        return self._model.context_tokens

    @property
    def eos_token_ids(self) -> frozenset[int]:
        return self._model.eos_token_ids

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt, with what the model puts before every text (such as BOS).

        Raises
        ------
        InvalidParameter
            Not a string, empty, or with lone surrogates.
        ContextOverflow
            So long that no tokenization could fit the context; found before tokenizing it.
        """
        text = checked_text("prompt", text)
        if not text:
            raise InvalidParameter("prompt", "", "must not be empty")
        self._refuse_hopeless(text)
        return _ids(self._plain, text)

    def chat(self, messages: Sequence[dict[str, Any]]) -> list[int]:
        """Token ids of a conversation in the model's chat template, ready for the answer.

        Parameters
        ----------
        messages
            ``{"role": ..., "content": ...}`` with the roles system, developer (the same as
            system), user and assistant; content is a string or a list of text parts as OpenAI's
            API has them. Other keys are not used.

        Raises
        ------
        InvalidParameter
            Names the message and the field.
        ContextOverflow
            As ``encode``.
        """
        checked = checked_messages(messages)
        ids: list[int] = []
        for text, is_template in self._template.render(checked):
            self._refuse_hopeless(text)
            rust = self._with_special if is_template else self._plain
            ids += _ids(rust, text, add_special_tokens=False)
        return ids

    def decode(self, token_ids: Iterable[int]) -> str:
        """The text of the tokens, special ones left out; invalid UTF-8 becomes U+FFFD."""
        detokenizer = Detokenizer(self)
        for token_id in token_ids:
            detokenizer.push(token_id)
        detokenizer.flush()
        return detokenizer.text

    def token_text(self, token_id: int) -> str:
        """A token as the vocabulary writes it, special ones too; empty for an id that it lacks."""
        return self._plain.id_to_token(token_id) or ""

    def _refuse_hopeless(self, text: str) -> None:
        limit = self.context_tokens * self._max_token_chars
        if len(text) > limit:
            raise ContextOverflow(
                f"the prompt has {len(text)} characters; the context of {self.context_tokens} "
                f"tokens holds at most {limit}: shorten it"
            )


def _ids(rust: RustTokenizer, text: str, add_special_tokens: bool = True) -> list[int]:
    """As ``encode`` gives them, but several times faster and, for other threads, without the GIL:
    no offsets of a long prompt are made, and only this method lets go of it."""
    [encoding] = rust.encode_batch_fast([text], add_special_tokens=add_special_tokens)
    ids: list[int] = encoding.ids
    return ids

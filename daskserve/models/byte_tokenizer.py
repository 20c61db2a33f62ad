"""A small byte-level tokenizer for the models that are built on the spot.

All 256 bytes are tokens, so any text goes in and comes back; a few merges give it tokens with
leading spaces and several characters, like those of real models.
"""

from __future__ import annotations

import json
from pathlib import Path

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>")
END_OF_TURN_ID = 2
PAD_ID = 3

# "Ġ" is how byte-level vocabularies write a space. 60 merges bring the vocabulary to 320.
_MERGES = (
    "Ġ t|Ġ a|i n|h e|Ġ Ġ|r e|o n|e r|Ġt he|a t|Ġ s|Ġ o|e n|Ġ c|e s|Ġ w|n d|i t|o r|i s|a l|Ġ p|"
    "in g|Ġ f|a n|e d|Ġ b|o u|a r|Ġ in|Ġo f|Ġ m|Ġa nd|i on|i c|Ġ d|Ġt o|ĠĠ ĠĠ|l e|r o|a s|en t|"
    "Ġ h|Ġt h|c t|Ġ e|Ġ re|e l|o m|i l|s t|Ġ l|Ġ n|e t|i m|v e|o l|a c|Ġ is|l y"
).split("|")

VOCAB_SIZE = len(SPECIAL_TOKENS) + 256 + len(_MERGES)

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def write(folder: Path) -> None:
    """Write ``tokenizer.json``, ``tokenizer_config.json`` and ``chat_template.jinja``."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    merges = [(left, right) for left, right in (merge.split(" ") for merge in _MERGES)]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    entries = [*SPECIAL_TOKENS, *alphabet, *("".join(merge) for merge in merges)]
    vocab = {token: token_id for token_id, token in enumerate(entries)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer.save(str(folder / "tokenizer.json"))
    write_tokenizer_config(folder, eos=SPECIAL_TOKENS[END_OF_TURN_ID], pad=SPECIAL_TOKENS[PAD_ID])
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")


def write_tokenizer_config(folder: Path, *, eos: str, pad: str, bos: str | None = None) -> None:
    """What transformers needs beside ``tokenizer.json`` to load the same tokenizer."""
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": bos,
        "eos_token": eos,
        "pad_token": pad,
        "clean_up_tokenization_spaces": False,
    }
    text = json.dumps(config, indent=2)
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")

"""Text to token ids and back: tokenizer, chat template, incremental detokenisation. No torch."""

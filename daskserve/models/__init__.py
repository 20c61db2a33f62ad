"""Where a model name leads: the embedded default, directories, the Hub, random test models."""

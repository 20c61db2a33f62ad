"""Where a model name leads: the embedded default, local directories, the Hub, random test models."""

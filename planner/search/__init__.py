"""Placement search: which instances, split how, how many, and on which GPUs."""

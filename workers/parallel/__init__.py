"""Instances of several ranks: tensor and pipeline parallel over torch.distributed."""

"""A linear layer whose inputs are split over the ranks of a stage."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from daskserve.workers.parallel.group import RankGroup


class RowSplitLinear(torch.nn.Module):
    """Every rank multiplies its columns of the weight; the products are added up, the bias once.

    Parameters
    ----------
    in_features
        Of this rank.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool, group: RankGroup) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(out_features, in_features))
        self.bias = torch.nn.Parameter(torch.empty(out_features)) if bias else None
        self._group = group

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        output = self._group.reduce_stage(F.linear(inputs, self.weight))
        return output if self.bias is None else output.add_(self.bias)

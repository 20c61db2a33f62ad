"""Batch jobs: every row of a file or table answered once, whatever happens on the way."""

from __future__ import annotations

from daskserve.batch.runner import BatchJob, run_batch
from daskserve.batch.summary import BatchSummary

__all__ = ["BatchJob", "BatchSummary", "run_batch"]

"""What a running service looks like from outside: plain values with a JSON round trip.

Instances tell the scheduler once a second how they are and which requests they have finished; one
`Snapshot` of all that is what dashboards and whoever else watches a service read. A `Window` turns
snapshots into `Sample` rows: rates, attainment and percentiles of the last seconds.
"""

from daskserve.observe.finished import Finished
from daskserve.observe.jobs import FailedRow, JobProgress
from daskserve.observe.observation import Observation
from daskserve.observe.sample import InstanceSample, Percentiles, Sample
from daskserve.observe.snapshot import InstanceFigures, Place, Snapshot
from daskserve.observe.window import Window

__all__ = [
    "FailedRow",
    "Finished",
    "InstanceFigures",
    "InstanceSample",
    "JobProgress",
    "Observation",
    "Percentiles",
    "Place",
    "Sample",
    "Snapshot",
    "Window",
]

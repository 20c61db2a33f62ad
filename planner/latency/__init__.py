"""How long a step takes: several models behind one protocol, none faster than the data sheet."""

from daskserve.planner.latency.calibrated import CalibratedModel
from daskserve.planner.latency.calibration import Calibration, read_calibration
from daskserve.planner.latency.distserve_a100 import DistServeA100
from daskserve.planner.latency.fit import fit_efficiencies, fit_paper_model, median_error
from daskserve.planner.latency.guard import at_least_physical
from daskserve.planner.latency.memory import MemoryBudget, kv_capacity_tokens
from daskserve.planner.latency.paper import PaperCoefficients, PaperModel
from daskserve.planner.latency.profile import Profile, read_profile
from daskserve.planner.latency.protocol import LatencyModel
from daskserve.planner.latency.roofline import Efficiencies, Roofline
from daskserve.planner.latency.table import TableModel

__all__ = [
    "Calibration",
    "CalibratedModel",
    "DistServeA100",
    "Efficiencies",
    "LatencyModel",
    "MemoryBudget",
    "PaperCoefficients",
    "PaperModel",
    "Profile",
    "Roofline",
    "TableModel",
    "at_least_physical",
    "fit_efficiencies",
    "fit_paper_model",
    "kv_capacity_tokens",
    "median_error",
    "read_calibration",
    "read_profile",
]

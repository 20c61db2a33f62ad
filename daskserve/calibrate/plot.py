"""The residuals of a calibration as a picture, where matplotlib is installed."""

from __future__ import annotations

from pathlib import Path

from daskserve.errors import ConfigError
from daskserve.planner.latency.calibration import Calibration

SUFFIXES = (".png", ".pdf", ".svg")


def check_can_plot(path: Path) -> None:
    """Before anything is measured. Raises ConfigError: no matplotlib, or another kind of file."""
    if path.suffix.lower() not in SUFFIXES:
        raise ConfigError(f"--plot {path}: the name must end in {', '.join(SUFFIXES)}")
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            "--plot needs matplotlib: pip install matplotlib, or leave --plot out; the residuals"
            " are printed as text too"
        ) from error


def save_plot(found: Calibration, path: Path) -> None:
    """Relative errors over measured step times, one panel per phase (ConfigError)."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.5), layout="constrained")
    figure.suptitle(
        f"{found.engine.model} {found.engine.dtype}, {found.engine.num_threads} threads"
        + ("" if found.is_trusted else ": NOT trusted")
    )
    panels = figure.subplots(1, 2, sharey=True)
    for panel, (phase, error) in zip(panels, found.errors.items(), strict=True):
        for is_held_out, mark, label in ((False, "o", "fitted"), (True, "x", "held out")):
            mine = [p for p in found.steps if p.phase == phase and p.is_held_out is is_held_out]
            panel.scatter(
                [point.median_s * 1e3 for point in mine],
                [point.error * 100 for point in mine],
                marker=mark,
                label=label,
            )
        panel.axhline(0.0, color="black", linewidth=0.8)
        panel.axhspan(-error.limit * 100, error.limit * 100, alpha=0.1)
        panel.set(
            xscale="log",
            xlabel="measured step, ms",
            title=f"{phase}: held-out median {error.median:.1%}, p90 {error.p90:.1%}",
        )
    panels[0].set_ylabel("fitted / measured - 1, %")
    panels[0].legend()
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}") from error

"""Plots of the losses of runs and sweeps."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from gpt4d.runs.history import History, Point, interval_means

_INTERVALS = 200
_MAX_LEGEND = 40
_MARKERS, _MARKER_NAMES = "os^Dv", ("points", "squares", "triangles", "diamonds", "inverted triangles")
_X: dict[str, Callable[[Point], float]] = {
    "step": lambda point: point.step,
    "tokens": lambda point: point.seen,
    "hours": lambda point: point.elapsed_s / 3600,
}
X_AXES = tuple(_X)


def plot_losses(runs: Mapping[str, History], path: Path, *x_axes: str, title: str = "") -> None:
    """Plot training losses as lines, smoothed by the means of intervals, and validation losses as points.

    The points of each validation set have a marker, and for a single run also a color, of their own.

    Args:
        runs: the histories of the runs by name.
        path: the file to write; its suffix is the format.
        x_axes: one panel for each: step, tokens (or images, if the runs count images) or hours; by default tokens.
        title: the title of the plot.
    """
    from matplotlib.figure import Figure

    x_axes = x_axes or ("tokens",)
    several = len(runs) > 1
    figure = Figure(figsize=(8 + 4 * (len(x_axes) - 1) + 2 * several, 5), layout="constrained")
    panels = figure.subplots(1, len(x_axes), sharey=True, squeeze=False)[0]
    for panel, x in zip(panels, x_axes, strict=True):
        markers = _plot_panel(panel, runs, x)
    unit = _unit(runs)
    names = ", ".join(f"{_MARKER_NAMES[_MARKERS.index(marker)]}: {name}" for name, marker in markers.items())
    panels[0].set_ylabel(f"loss per {unit.removesuffix('s')}" + (f" ({names})" if several else ""))
    figure.suptitle(title)
    if several and len(runs) <= _MAX_LEGEND:
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right upper", fontsize="small")
    elif not several:
        panels[0].legend()
    figure.savefig(path, dpi=120)


def _plot_panel(axes: Any, runs: Mapping[str, History], x: str) -> dict[str, str]:
    """Plot the losses of ``runs`` over ``x``. Return the marker of each validation set by its label."""
    from matplotlib import colormaps
    from matplotlib.ticker import EngFormatter

    several = len(runs) > 1
    colors = colormaps["tab10"].colors if len(runs) <= 10 else colormaps["viridis"].resampled(len(runs)).colors  # type: ignore[attr-defined]
    initial, markers = [], dict[str, str]()
    for (name, history), color in zip(runs.items(), colors, strict=False):
        training = interval_means([history.training[step] for step in sorted(history.training)], _INTERVALS)
        initial += [point.loss for point in training[:1]]
        of_x, of_loss = (lambda points: [_X[x](point) for point in points]), (lambda points: [p.loss for p in points])
        axes.plot(of_x(training), of_loss(training), color=color, label=name if several else "training")
        for number, (label, losses) in enumerate([("validation", history.validation), *history.sets.items()]):
            points = [losses[step] for step in sorted(losses)]
            marker = markers.setdefault(label, _MARKERS[len(markers) % len(_MARKERS)])
            style: dict[str, Any] = {"color": color} if several else {"color": f"C{number + 1}", "label": label}
            axes.plot(of_x(points), of_loss(points), marker if several else f"{marker}--", **style)
    if initial:  # a diverged loss must not flatten the remaining curves
        axes.set_ylim(top=min(axes.get_ylim()[1], 1.1 * max(initial)))
    axes.set_xlabel({"step": "step", "tokens": f"{_unit(runs)} seen", "hours": "hours"}[x])
    if x == "tokens":
        axes.xaxis.set_major_formatter(EngFormatter())
    axes.grid(alpha=0.3)
    return markers


def _unit(runs: Mapping[str, History]) -> str:
    return next((history.unit for history in runs.values()), "tokens")

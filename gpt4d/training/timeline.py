"""Plot of the timeline of one training step: computation of the layers, and collectives on each axis of the grid."""

from pathlib import Path
from typing import NamedTuple

from gpt4d.parallel.comm.stats import CommStats

_COLORS = {"forward": "#78a9d8", "recomputation": "#ecd04f", "backward": "#eda263", "update": "#a892d0"}
_OTHER, _IN_FLIGHT, _WAITING = "#e8e8e8", "#b5bfc7", "#b3202c"
_WIDTH_IN, _FONT = 15.0, 8


class LayerSpan(NamedTuple):
    """Interval in which a layer computes one phase of a step. ``draw`` takes seconds since the step began."""

    name: str  # dotted: blocks.0.mlp.up is inside blocks.0
    phase: str  # forward, recomputation, backward or update
    start: float
    stop: float


def draw(path: Path, title: str, seconds: float, spans: list[LayerSpan], axes: dict[str, CommStats]) -> None:
    """Draw a step of ``seconds`` as a PNG: the ``spans`` of rank 0 in two lanes, and a row for each of ``axes``.

    All times are in seconds since the step began.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDTH_IN, 2.9 + 0.55 * len(axes)), layout="constrained")
    plot = figure.add_subplot()

    def bars(intervals, bottom: float, height: float, **style) -> None:
        plot.broken_barh([(a * 1e3, (b - a) * 1e3) for a, b in intervals], (bottom, height), **style)

    bars([(0, seconds)], 0, 1.8, color=_OTHER, linewidth=0, label="other computation (loss, norms, …)")
    outer, inner = lanes(spans)
    for phase, color in _COLORS.items():
        for lane, bottom, height in ((outer, 1.25, 0.55), (inner, 0, 1.2)):
            pieces = [(a, b) for span, a, b in lane if span.phase == phase]
            label = phase if pieces and lane is outer else None
            bars(pieces, bottom, height, facecolor=color, edgecolor="white", linewidth=0.4, label=label)
    for span, start, stop in outer:
        _write(plot, [span.name, span.name.rpartition(".")[2]], start, stop, 1.525, seconds)
    for span, start, stop in inner:
        _write(plot, [span.name.rpartition(".")[2]], start, stop, 0.6, seconds, upright=True)

    waited = sum(traffic.seconds()["exposed_s"] for traffic in axes.values())
    ticks = {0.9: f"compute\n{_ms(seconds - waited)} ms"}
    for row, (name, traffic) in enumerate(axes.items(), start=1):
        bottom = -0.8 * row
        labels = ("collective in flight", "computation waits for it (pale above)") if row == 1 else (None, None)
        bars(traffic.run_intervals, bottom, 0.6, color=_IN_FLIGHT, linewidth=0, label=labels[0])
        bars(traffic.wait_intervals, bottom, 0.6, color=_WAITING, linewidth=0, label=labels[1])
        bars(traffic.wait_intervals, 0, 1.8, color="white", alpha=0.7, linewidth=0, zorder=2)
        times = traffic.seconds()
        ticks[bottom + 0.3] = f"{name}\nexposed {_ms(times['exposed_s'])}, hidden {_ms(times['hidden_s'])} ms"
    plot.set_yticks(list(ticks), list(ticks.values()))
    plot.tick_params(axis="y", length=0)
    plot.set_xlim(0, seconds * 1e3)
    plot.set_xlabel("ms")
    plot.set_title(title)
    plot.spines[["top", "right", "left"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=8, frameon=False)
    figure.savefig(path, dpi=120)


def lanes(spans: list[LayerSpan]) -> tuple[list, list]:
    """Return the visible intervals of two lanes: the outermost layers and the innermost layers."""
    names = {span.name for span in spans}
    parents = {name: [parent for parent in _ancestors(name) if parent in names] for name in names}
    containers = {parent for ancestors in parents.values() for parent in ancestors}
    return _visible([s for s in spans if not parents[s.name]]), _visible([s for s in spans if s.name not in containers])


def _ancestors(name: str) -> list[str]:
    """Return the dotted prefixes of a name: a and a.b for ``a.b.c``."""
    parts = name.split(".")
    return [".".join(parts[:i]) for i in range(1, len(parts))]


def _visible(spans: list[LayerSpan]) -> list[tuple[LayerSpan, float, float]]:
    """Return the visible intervals (span, start, stop) of a lane. An inner span covers the span that contains it."""
    active: list[LayerSpan] = []  # spans that have started and not ended, the outermost first
    pieces, reached = [], 0.0
    for next_span in [*sorted(spans, key=lambda span: span.start), None]:
        until = next_span.start if next_span else float("inf")
        while active and reached < until:
            stop = min(active[-1].stop, until)
            if stop > reached:
                pieces.append((active[-1], reached, stop))
                reached = stop
            if active[-1].stop <= until:
                active.pop()
        if next_span:
            active.append(next_span)
        reached = until
    return pieces


def _write(plot, names: list[str], start, stop, height: float, seconds: float, upright: bool = False) -> None:
    """Write the first name that fits the bar. If no name fits and ``upright`` is set, write the last one vertically."""
    room = (stop - start) / seconds * 0.8 * _WIDTH_IN * 72 / _FONT  # in letter heights
    fitting = next((name for name in names if room > 0.6 * len(name)), None)
    if fitting or (upright and room > 1):
        center, rotation = (start + stop) / 2 * 1e3, 0 if fitting else 90
        plot.text(center, height, fitting or names[-1], ha="center", va="center", fontsize=_FONT, rotation=rotation)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f}"

"""A picture of one step: what the layers computed and what each axis of the grid carried meanwhile, on a time line."""

from pathlib import Path
from typing import NamedTuple

from gpt4d.parallel.traffic import Traffic

_COLOURS = {"forward": "#78a9d8", "recomputation": "#ecd04f", "backward": "#eda263", "update": "#a892d0"}
_OTHER, _UNDER_WAY, _WAITING = "#e8e8e8", "#b5bfc7", "#b3202c"
_WIDTH_IN, _FONT = 15.0, 8


class Span(NamedTuple):
    """What a layer computes in one phase of a step; in a picture, the times are seconds since the step began."""

    name: str  # dotted: blocks.0.mlp.up is within blocks.0
    phase: str  # forward, recomputation, backward or update
    start: float
    stop: float


def draw(path: Path, title: str, seconds: float, spans: list[Span], axes: dict[str, Traffic]) -> None:
    """Draws a step of ``seconds`` as a PNG: the ``spans`` of rank 0 in two lanes, and a row for each of ``axes``.

    The times of the spans and of the traffic are seconds since the step began.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDTH_IN, 2.9 + 0.55 * len(axes)), layout="constrained")
    plot = figure.add_subplot()

    def bars(intervals, bottom: float, height: float, **style) -> None:
        plot.broken_barh([(a * 1e3, (b - a) * 1e3) for a, b in intervals], (bottom, height), **style)

    bars([(0, seconds)], 0, 1.8, color=_OTHER, linewidth=0, label="other computation (loss, norms, …)")
    outer, inner = _lanes(spans)
    for phase, colour in _COLOURS.items():
        for lane, bottom, height in ((outer, 1.25, 0.55), (inner, 0, 1.2)):
            pieces = [(a, b) for span, a, b in lane if span.phase == phase]
            label = phase if pieces and lane is outer else None
            bars(pieces, bottom, height, facecolor=colour, edgecolor="white", linewidth=0.4, label=label)
    for span, start, stop in outer:
        _write(plot, [span.name, span.name.rpartition(".")[2]], start, stop, 1.525, seconds)
    for span, start, stop in inner:
        _write(plot, [span.name.rpartition(".")[2]], start, stop, 0.6, seconds, upright=True)

    waited = sum(traffic.seconds()["exposed_s"] for traffic in axes.values())
    ticks = {0.9: f"compute\n{_ms(seconds - waited)} ms"}
    for row, (name, traffic) in enumerate(axes.items(), start=1):
        bottom = -0.8 * row
        names = ("collective under way", "computation waits for it (pale above)") if row == 1 else (None, None)
        bars(traffic.runs, bottom, 0.6, color=_UNDER_WAY, linewidth=0, label=names[0])
        bars(traffic.waits, bottom, 0.6, color=_WAITING, linewidth=0, label=names[1])
        bars(traffic.waits, 0, 1.8, color="white", alpha=0.7, linewidth=0, zorder=2)
        used = traffic.seconds()
        ticks[bottom + 0.3] = f"{name}\nexposed {_ms(used['exposed_s'])}, hidden {_ms(used['hidden_s'])} ms"
    plot.set_yticks(list(ticks), list(ticks.values()))
    plot.tick_params(axis="y", length=0)
    plot.set_xlim(0, seconds * 1e3)
    plot.set_xlabel("ms")
    plot.set_title(title)
    plot.spines[["top", "right", "left"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=8, frameon=False)
    figure.savefig(path, dpi=120)


def _lanes(spans: list[Span]) -> tuple[list, list]:
    """What the lanes of the outermost and of the innermost layers show."""
    names = {span.name for span in spans}
    around = {name: [n for n in _containers(name) if n in names] for name in names}
    containers = {n for found in around.values() for n in found}
    return _visible([s for s in spans if not around[s.name]]), _visible([s for s in spans if s.name not in containers])


def _containers(name: str) -> list[str]:
    """``a.b.c`` → a, a.b."""
    parts = name.split(".")
    return [".".join(parts[:i]) for i in range(1, len(parts))]


def _visible(spans: list[Span]) -> list[tuple[Span, float, float]]:
    """The pieces (span, from, to) of a lane: of nested spans the inner one, while it lasts."""
    pieces, around, reached = [], [], 0.0  # around: spans begun and not over, the outermost first
    for following in [*sorted(spans, key=lambda span: span.start), None]:
        until = following.start if following else float("inf")
        while around and reached < until:
            stop = min(around[-1].stop, until)
            if stop > reached:
                pieces.append((around[-1], reached, stop))
                reached = stop
            if around[-1].stop <= until:
                around.pop()
        around.append(following)
        reached = until
    return pieces


def _write(plot, names: list[str], start, stop, height: float, seconds: float, upright: bool = False) -> None:
    """The first of the names that the bar has room for; else the last one upright, if it may be; else none."""
    room = (stop - start) / seconds * 0.8 * _WIDTH_IN * 72 / _FONT  # in heights of a letter
    fitting = next((name for name in names if room > 0.6 * len(name)), None)
    if fitting or (upright and room > 1):
        at, rotation = (start + stop) / 2 * 1e3, 0 if fitting else 90
        plot.text(at, height, fitting or names[-1], ha="center", va="center", fontsize=_FONT, rotation=rotation)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f}"

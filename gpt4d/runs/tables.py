"""Tables of runs and of their differences (rich)."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from gpt4d.config import Change
from gpt4d.runs.summary import AVERAGED_LINES, Run, State, differing_keys
from gpt4d.runtime.errors import printable

_STYLES = {State.RUNNING: "cyan", State.FINISHED: "green", State.INTERRUPTED: "yellow"}
_STYLES |= dict.fromkeys((State.FAILED, State.UNREADABLE), "red")
_MAX_SETTINGS = 8
_WIDTH = 200  # characters per line where the output is not a terminal


def console() -> Console:
    """Return a console for tables, 200 characters wide if the output is not a terminal."""
    plain = Console(highlight=False)
    return plain if plain.is_terminal else Console(highlight=False, width=_WIDTH)


def runs_table(runs: Sequence[Run], names: Mapping[str, str] | None = None) -> Table:
    """Return a table with one row per run and one column for each setting that differs between the runs.

    Each additional validation set has a column for its last loss. ``names`` has the name of a run by its path; the
    default is the path.
    """
    keys = differing_keys([run.settings for run in runs])
    table = Table(box=box.SIMPLE_HEAD, header_style="", caption_justify="left", caption_style="")
    table.add_column("run", overflow="fold")
    for key in keys[:_MAX_SETTINGS]:
        table.add_column(key, overflow="fold")
    table.add_column("state")
    sets = [*dict.fromkeys(name for run in runs for name in run.set_losses)]
    for heading in ("step", f"loss (last {AVERAGED_LINES})", "validation", *sets, "speed", "left", "last line"):
        table.add_column(heading, justify="right")
    for run in runs:
        history = run.history
        speed = f"{history.per_s:,.0f} {history.unit}/s" if history.per_s is not None else ""
        cells = [escape(_text((names or {}).get(str(run.path), str(run.path))))]
        cells += [escape(_text(run.settings[key])) if key in run.settings else "" for key in keys[:_MAX_SETTINGS]]
        cells += [f"[{_STYLES[run.state]}]{run.state}[/]" if run.state in _STYLES else run.state.value]
        cells += [f"{history.step}/{run.steps}" if run.steps else str(history.step)]
        cells += map(_loss, (run.loss, run.validation_loss, *(run.set_losses.get(name) for name in sets)))
        cells += [speed, "" if run.left_s is None else duration(run.left_s), _date(history.time)]
        table.add_row(*cells)
    notes = [_text(f"{run.path}: {' '.join(run.problem.split())}") for run in runs if run.problem]
    if len(keys) > _MAX_SETTINGS:
        notes.append(f"{len(keys) - _MAX_SETTINGS} more setting(s) differ: {', '.join(keys[_MAX_SETTINGS:])}")
    table.caption = escape("\n".join(notes)) if notes else None
    return table


def differences_table(first: Run, second: Run, differences: Mapping[str, Change]) -> Table:
    """Return a table with one row for each difference between two runs."""
    table = Table(box=box.SIMPLE_HEAD, header_style="")
    for heading in ("", first.path, second.path):
        table.add_column(escape(_text(heading)), overflow="fold")
    for key, change in differences.items():
        table.add_row(*(escape(_text(cell)) for cell in (key, change.before, change.after)))
    return table


def duration(seconds: float) -> str:
    """Return seconds as ``h:mm:ss``, or as ``m:ss`` below an hour."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def _text(value: Any) -> str:
    """Return a value as printable text: a damaged file, or a name, may contain anything."""
    if isinstance(value, Mapping):
        value = [f"{key}: {item}" for key, item in value.items()]
    text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    return printable(text)


def _loss(loss: float | None) -> str:
    return "" if loss is None else f"{loss:.4f}"


def _date(seconds: float | None) -> str:
    try:
        return "" if seconds is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))
    except (OverflowError, ValueError, OSError):  # a damaged line
        return ""

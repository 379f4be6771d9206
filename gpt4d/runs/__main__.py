"""List, compare, plot and watch runs: ``python -m gpt4d.runs [COMMAND] [DIR …] [key=value …]``.

    [DIR …]                      list the runs in and below the directories (default: runs)
        format=table             or json
    diff A B                     print the settings, commit, versions, grids and data that differ between two runs
    plot A [B …] out=FILE        plot training losses (lines) and validation losses (points)
        x=tokens                 or step, hours
    watch [DIR …]                show the list until Ctrl-C, and read it again every few seconds
        every_s=2

The commands only read files, so they run on a login node and never delay a run.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import MISSING

from gpt4d.config import (
    ConfigError,
    asks_for_help,
    check_image_format,
    from_arguments,
    known_keys,
    setting,
)
from gpt4d.config.commands import one_line_errors
from gpt4d.runs import plots
from gpt4d.runs.summary import Run, differences, find_runs, open_run
from gpt4d.runs.tables import console, differences_table, runs_table
from gpt4d.runtime.files import required_file


@dataclass
class ListConfig:
    """Settings of the list."""

    format: str = setting("table", "form of the output", choices=("table", "json"))


@dataclass
class DiffConfig:
    """The command ``diff`` has no settings."""


@dataclass
class PlotConfig:
    """Settings of ``plot``; ``out`` is a .png, .pdf or .svg file."""

    out: str = MISSING
    x: str = setting("tokens", "quantity on the horizontal axis", choices=plots.X_AXES)


@dataclass
class WatchConfig:
    """Settings of ``watch``."""

    every_s: float = setting(2.0, "seconds between updates", above=0)


def list_runs(paths: list[Path], config: ListConfig) -> None:
    """Print the runs in and below ``paths``, by default below ``runs``, as a table or as JSON."""
    runs = find_runs(paths or [Path("runs")])
    if config.format == "json":
        print(json.dumps([run.to_json() for run in runs], indent=1))
    else:
        console().print(runs_table(runs))


def diff(paths: list[Path], config: DiffConfig) -> None:
    """Print a table of the differences between two runs. Raises ConfigError unless ``paths`` has two."""
    if len(paths) != 2:
        raise ConfigError(f"diff: {len(paths)} run(s); pass two")
    first, second = map(open_run, paths)
    found = differences(first, second)
    if found:
        console().print(differences_table(first, second, found))
    else:
        print(f"{first.path} and {second.path} have equal settings, commits, versions, grids and data")


def plot(paths: list[Path], config: PlotConfig) -> None:
    """Plot the losses of runs to ``config.out``. Raises ConfigError for a run without a logged loss."""
    check_image_format("out", config.out)
    if not paths:
        raise ConfigError("plot: no run; pass at least one")
    histories = {str(path): open_run(path).history for path in paths}
    for path, history in histories.items():
        if not history.training:
            raise ConfigError(f"{path}: no loss yet; wait for its first line in metrics.jsonl")
    parent = os.path.commonpath([path.absolute().parent for path in paths])
    named = {os.path.relpath(path, parent): history for path, history in histories.items()}
    out = Path(config.out)
    with required_file(out):
        plots.plot_losses(named, out, config.x, title=paths[0].name if len(paths) == 1 else parent)
    print(config.out)


def watch(paths: list[Path], config: WatchConfig) -> None:
    """Show a table of the runs and update it every ``config.every_s`` seconds until Ctrl-C."""
    from rich.live import Live

    runs: list[Run] = []
    with Live(console=console(), auto_refresh=False) as live:
        while True:
            runs = find_runs(paths or [Path("runs")], known=runs)
            live.update(runs_table(runs), refresh=True)
            time.sleep(config.every_s)


_Command = tuple[Callable[[list[Path], Any], None], type]
_COMMANDS: dict[str, _Command] = {
    "diff": (diff, DiffConfig),
    "plot": (plot, PlotConfig),
    "watch": (watch, WatchConfig),
}


def main(arguments: list[str]) -> None:
    """Run the command that the first argument names, or list runs."""
    if asks_for_help(arguments):
        print(__doc__)
        return
    selected: _Command = (list_runs, ListConfig)
    if arguments and arguments[0] in _COMMANDS:
        selected, arguments = _COMMANDS[arguments[0]], arguments[1:]
    command, schema = selected
    # Names of a sweep's directories also contain "=", as in lr=0.001.
    options = [argument for argument in arguments if argument.partition("=")[0] in known_keys(schema)]
    paths = [Path(argument) for argument in arguments if argument not in options]
    try:
        command(paths, from_arguments(schema, options))
    except KeyboardInterrupt:
        print()


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends the command without a traceback
    with one_line_errors():
        main(sys.argv[1:])

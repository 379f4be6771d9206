"""The command ``gpt4d``, such as ``gpt4d train train.steps=100``.

Commands: train, plan, prepare, checkpoint, generate, chat, evaluate, runs, config. ``gpt4d COMMAND --help``
describes one.
"""

import sys
from importlib import import_module

from gpt4d.runtime.signals import end_on_signals

MODULES = {
    "train": "gpt4d.training.run",
    "plan": "gpt4d.planner.__main__",
    "prepare": "gpt4d.data.prepare",
    "checkpoint": "gpt4d.checkpoint.__main__",
    "generate": "gpt4d.generate",
    "chat": "gpt4d.chat",
    "evaluate": "gpt4d.evaluate",
    "runs": "gpt4d.runs.__main__",
    "config": "gpt4d.config.__main__",
}


def main() -> None:
    """Pass the arguments behind the command on to the main function of its module."""
    command, arguments = (sys.argv[1:2] or ["--help"])[0], sys.argv[2:]
    if command == "train":
        end_on_signals()  # first, because the remaining imports take a second
    from gpt4d.config import ConfigError, asks_for_help
    from gpt4d.config.commands import one_line_errors

    with one_line_errors():
        if asks_for_help([command]):
            print((__doc__ or "").strip())
        elif command not in MODULES:
            raise ConfigError(f"gpt4d {command}: there is no such command; use one of {', '.join(MODULES)}")
        else:
            import_module(MODULES[command]).main(arguments)


if __name__ == "__main__":
    main()

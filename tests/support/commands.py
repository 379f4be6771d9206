"""Commands of gpt4d as a user starts them: torchrun, settings on a command line and messages of mistakes."""

import json
import re
from collections.abc import Callable, Iterable

from gpt4d.config import Config, ConfigError, known_keys, value_of
from tests.support.environment import REPOSITORY

TRAIN = str(REPOSITORY / "train.py")


def launcher(ranks: int) -> list[str]:
    """Return the arguments of Python that start train.py under torchrun."""
    options = ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", f"--nproc-per-node={ranks}"]
    return ["-m", "torch.distributed.run", *options, TRAIN]


def overrides(config: Config) -> list[str]:
    """Return the configuration of a GPT-2 as overrides for the command line."""
    keys = [k for k in known_keys() if not k.startswith(("cluster.", "model."))]
    values = {k: value_of(config, k) for k in [*keys, *known_keys(type(config.model), "model.")]}
    return ["model=gpt_tiny", *(f"{k}={json.dumps(v)}" for k, v in values.items())]


def wrong_messages(cases: Iterable[tuple], report: Callable[..., object]) -> list[str]:
    """Return the cases ``(*arguments, message)`` in which ``report(*arguments)`` raises no one-line ConfigError of it.

    ``message``: a part of the line, in which " … " stands for any characters; its beginning if it begins with ``^``.
    """
    wrong = []
    for *arguments, message in cases:
        try:
            report(*arguments)
            line = "no error"
        except ConfigError as error:
            line = str(error)
        pattern = ".*".join(map(re.escape, message.removeprefix("^").split(" … ")))
        if not re.search("^" * message.startswith("^") + pattern, line) or "\n" in line:
            wrong.append(f"{arguments}: {line!r} instead of {message!r}")
    return wrong

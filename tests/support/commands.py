"""Commands of gpt4d as a user starts them: processes, torchrun, settings on a command line and messages of mistakes."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable

from gpt4d.config import Config, ConfigError, known_keys, value_of
from tests.support.environment import REPOSITORY

TRAIN = str(REPOSITORY / "train.py")


def command(*arguments: str, timeout: float = 120) -> subprocess.CompletedProcess:
    """Run ``python ARGUMENTS`` in a session of its own, so that a timeout ends all processes that it has started."""
    process = subprocess.Popen(
        [sys.executable, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        raise
    return subprocess.CompletedProcess(arguments, process.returncode, out, err)


def launcher(ranks: int) -> list[str]:
    """Return the arguments of Python that start train.py under torchrun."""
    options = ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", f"--nproc-per-node={ranks}"]
    return ["-m", "torch.distributed.run", *options, TRAIN]


def torchrun(ranks: int, *arguments: str) -> subprocess.CompletedProcess:
    """Run train.py under torchrun."""
    return command(*launcher(ranks), *arguments)


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

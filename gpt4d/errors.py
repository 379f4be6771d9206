"""How errors reach people: a user's mistake is one line and exit code 1; a failure of ours keeps its traceback."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from gpt4d.config import ConfigError, explained
from gpt4d.parallel.launch import Launch


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Shows a ConfigError, Hydra's and OmegaConf's included, as one line on rank 0: all ranks meet the same."""
    try:
        yield
    except Exception as raised:
        error = explained(raised)
        if not isinstance(error, ConfigError):
            raise
        if Launch.from_environment().rank == 0:
            print(f"error: {error}", file=sys.stderr, flush=True)
        sys.exit(1)

"""How errors reach people: a user's mistake is one line and exit code 1; a failure of ours keeps its traceback."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from gpt4d.config import ConfigError, explained
from gpt4d.parallel.launch import Launch

_PATIENCE_S = 30.0


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Shows a ConfigError, Hydra's and OmegaConf's included, as one line and exits with code 1.

    Nearly always all ranks meet the same mistake, and rank 0 tells it. The others give it the time: a launcher ends
    every process as soon as one has failed, and rank 0 may be slower. Should it not fail, they tell it themselves.
    """
    try:
        yield
    except Exception as raised:
        error = explained(raised)
        if not isinstance(error, ConfigError):
            raise
        rank = Launch.from_environment().rank
        if rank:
            time.sleep(_PATIENCE_S)
        print(f"error: {error}" if not rank else f"error on rank {rank}: {error}", file=sys.stderr, flush=True)
        sys.exit(1)

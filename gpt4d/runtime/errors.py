"""How errors reach people: a user's mistake is one line and exit code 1; a failure of ours keeps its traceback."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from gpt4d.config import ConfigError, NodeError, to_config_error
from gpt4d.runtime.launch import Launch, tell_error

_PATIENCE_S = 30.0


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Shows a ConfigError, Hydra's and OmegaConf's included, as one line and exits with code 1.

    Nearly always all ranks meet it, and rank 0 tells it. The others give it the time to: a launcher that sees one
    process fail ends the rest at once, and rank 0 may be slower. On another node the first rank then tells it too: a
    file may be missing there alone. What only a node's own ranks can meet, a NodeError, its first rank tells at once.
    """
    try:
        yield
    except Exception as raised:
        error = to_config_error(raised)
        if not isinstance(error, ConfigError):
            raise
        launch = Launch.from_environment()
        if launch.local_rank or (launch.rank and not isinstance(error, NodeError)):
            time.sleep(_PATIENCE_S)
        if launch.local_rank:
            sys.exit(1)
        tell_error(str(error))
        sys.exit(1)

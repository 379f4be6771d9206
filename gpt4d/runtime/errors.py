"""Display of errors: a user's mistake as one line with exit code 1, a bug with its traceback."""

import errno
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from gpt4d.config import ConfigError, NodeError, printable, to_config_error
from gpt4d.runtime.launch import Launch, print_error
from gpt4d.runtime.output import allow_lost_output
from gpt4d.runtime.signals import EXIT_CODE

# Errors of paths: no permission, too long a name, an unavailable or damaged file system.
_OF_PATHS = (errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.ESTALE, errno.ENOTCONN, errno.EIO)
_INTERRUPTED = 130  # exit code of a command that Ctrl-C has ended
PRINT_GRACE_S = 30.0  # for rank 0 to find the same error
_SHORT_GRACE_S = 1.0  # for rank 0 to print an error that it has found


class PortTaken(ConfigError):
    """Error of a job whose port another process uses. The same command may succeed later, or on another node."""

    all_ranks_raised = True  # each rank detects it independently, rank 0 first
    exit_code = EXIT_CODE


class Unavailable(ConfigError):
    """Error of a server that does not deliver the data. The same command may succeed later."""

    exit_code = EXIT_CODE


class RankError(RuntimeError):
    """Error of one rank that is reported without a traceback, as one line with location and remedy.

    Attributes:
        exit_code: exit code of the job that it ends.
    """

    def __init__(self, message: str, exit_code: int = 1):
        super().__init__(message)
        self.exit_code = exit_code


class OutOfMemory(RankError):
    """Error of one rank whose memory is exhausted."""


def one_line(error: object) -> str:
    """Return a library's error, or a text, as one line of limited length; the type of an error without a message."""
    return printable(" ".join(str(error).split())[:300]) or type(error).__name__


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Print a ConfigError (errors of Hydra, OmegaConf and paths included) as one line, and exit with its code.

    Usually all ranks raise the same error and rank 0 prints it. All other ranks wait before they exit, because a
    launcher ends all processes as soon as one fails, and rank 0 may be slower. After that wait, the first rank of every
    other node also prints the error, since its cause may exist on that node only (a missing file). This rank prints a
    NodeError, which only ranks of its own node can raise, immediately.

    Every command runs inside this context. Its output may be lost without an error, and Ctrl-C ends it with one line.
    """
    allow_lost_output()
    try:
        yield
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr, flush=True)
        sys.exit(_INTERRUPTED)
    except RankError as raised:  # the error of a single rank; with several ranks, the rendezvous reports it
        print_error(str(raised))
        sys.exit(raised.exit_code)
    except Exception as raised:
        error = to_config_error(raised)
        if isinstance(raised, OSError) and raised.errno in _OF_PATHS and raised.filename:
            error = ConfigError(f"{raised.filename}: {raised.strerror}; use a path that this user may access")
        if not isinstance(error, ConfigError):
            raise
        launch = Launch.for_errors()
        # The launcher of a sweep's job is the sweep, which does not end other ranks.
        if not launch.sweep_job and (launch.local_rank or (launch.rank and not isinstance(error, NodeError))):
            time.sleep(_SHORT_GRACE_S if error.all_ranks_raised else PRINT_GRACE_S)
        if not launch.local_rank:
            print_error(str(error))
        sys.exit(error.exit_code)

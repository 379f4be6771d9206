"""What every command does with errors: a user's mistake is one line with an exit code, a bug has its traceback."""

import errno
import io
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from gpt4d.config.composing import to_config_error
from gpt4d.runtime.errors import ConfigError, NodeError, RankError
from gpt4d.runtime.launch import Launch, print_error

# Errors of paths: no permission, too long a name, an unavailable or damaged file system.
_OF_PATHS = (errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.ESTALE, errno.ENOTCONN, errno.EIO)
_INTERRUPTED = 130  # exit code of a command that Ctrl-C has ended
PRINT_GRACE_S = 30.0  # for rank 0 to find the same error
_SHORT_GRACE_S = 1.0  # for rank 0 to print an error that it has found


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
    except RankError as raised:  # the error of a single rank; with several ranks, gpt4d.runtime.job reports it
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


class _LossyFile(io.FileIO):
    """A file whose writes never fail. Content that cannot be written is lost."""

    def write(self, content) -> int:
        try:
            written = super().write(content)
        except OSError:
            written = None
        return len(memoryview(content).cast("B")) if written is None else written  # None: the pipe is full


def allow_lost_output() -> None:
    """Let prints of this process succeed even if its standard output and standard error are lost.

    The end of a terminal or of ``| head`` must not end a training, and a warning must not replace an error. Streams
    that the caller has replaced remain unchanged.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed by the shell: ``>&-``
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 – open until the process ends
        elif stream is getattr(sys, f"__{name}__"):
            file = _LossyFile(stream.fileno(), "w", closefd=False)
            lossy = io.TextIOWrapper(
                io.BufferedWriter(file),
                encoding=stream.encoding,
                errors=stream.errors,
                line_buffering=stream.line_buffering or stream.write_through,
            )
            setattr(sys, name, lossy)

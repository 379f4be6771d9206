"""Errors of users and of single ranks, which commands print in one line (``gpt4d.config.commands``), and warnings."""

import sys

from gpt4d.runtime.signals import EXIT_CODE


def printable(text: str) -> str:
    """Return a text with escape sequences for newlines, tabs, ESC and all other characters that do not print."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


class ConfigError(ValueError):
    """Error of a user, in one line: key, value, problem and remedy. All ranks usually raise it together.

    ``problems``: usually one line. Names that come from files are in it, so it is made ``printable``.

    Attributes:
        all_ranks_raised: whether all ranks of the job are known to have raised it, so that no rank waits for another.
        exit_code: exit code of the command that it ends.
    """

    all_ranks_raised = False
    exit_code = 1

    def __init__(self, *problems: str):
        super().__init__("\nerror: ".join(map(printable, problems)))


class NodeError(ConfigError):
    """ConfigError that only the ranks of some nodes raise."""


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


def warn(problem: str) -> None:
    """Print a warning of one line."""
    print(f"warning: {problem}", file=sys.stderr, flush=True)

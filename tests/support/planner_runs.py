"""Rankings and answers of the planner."""

import functools
import io
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress

from gpt4d.config.commands import one_line_errors
from gpt4d.planner import __main__ as planner
from gpt4d.planner import search
from tests.support.settings import configured


@functools.cache
def ranked(devices: int, *overrides: str, keys: Sequence[str] = ()) -> search.Ranking:
    """Return the ranking of all plans of a configuration, which is made once in a session."""
    return search.rank(configured([*overrides]), devices, keys=keys)


def ask(*arguments: str) -> str:
    """Return the output of the planner's command, or its error."""
    out, errors = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(errors), suppress(SystemExit), one_line_errors():
        planner.main(list(arguments))
    return out.getvalue() or errors.getvalue()

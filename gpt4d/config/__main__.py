"""Explanation of settings: ``python -m gpt4d.config optim.lr``, or ``python -m gpt4d.config warmup`` to search.

Prints key, default, type, limits and meaning of the key, or of all keys whose name or meaning contains every word.
"""

import sys

from gpt4d.config.commands import one_line_errors
from gpt4d.config.composing import asks_for_help
from gpt4d.config.reference import explain
from gpt4d.model import registry  # noqa: F401 – registers the families' settings


def main(arguments: list[str]) -> None:
    """Print the explanation of the keys that ``arguments`` name or search for."""
    print(__doc__.strip() if asks_for_help(arguments) else explain(arguments))


if __name__ == "__main__":
    with one_line_errors():
        main(sys.argv[1:])

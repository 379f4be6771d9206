"""A rank of a job of torchrun, with the short timeouts of the soak: ``torchrun … -m tests.soak.rank [overrides]``."""

import sys

from gpt4d.run import train
from gpt4d.runtime.errors import one_line_errors
from tests.soak.faults import shorten
from tests.support.settings import configured

if __name__ == "__main__":
    shorten()
    with one_line_errors():
        train(configured(sys.argv[1:]))

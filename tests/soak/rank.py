"""A rank of a job of torchrun, with the short timeouts of the soak: ``torchrun … -m tests.soak.rank [overrides]``."""

import sys

import train
from gpt4d.config import compose
from gpt4d.runtime.errors import one_line_errors
from tests.runtime.test_faults import shorten_timeouts

if __name__ == "__main__":
    shorten_timeouts()
    with one_line_errors():
        train.train(compose(sys.argv[1:]))

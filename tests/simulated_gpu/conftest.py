import traceback
from concurrent.futures import ProcessPoolExecutor

import pytest

from tests.simulated_gpu import job


@pytest.fixture(scope="session")
def simulate(ranks):
    """Return a function that calls a function with arguments in a process with a simulated GPU."""
    with ProcessPoolExecutor(1, mp_context=ranks.context, initializer=job.set_up) as process:
        yield lambda function, *args: process.submit(_call, function, *args).result()


def _call(function, *args):
    try:
        return function(*args)
    except Exception:  # some exceptions of torch cannot be pickled
        raise AssertionError(traceback.format_exc()) from None

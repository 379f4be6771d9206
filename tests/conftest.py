import gc
import random
import shlex
import signal
from zlib import crc32

import pytest

from tests.support import environment

environment.isolate()  # before anything that reads variables
# isort: split

from gpt4d.config import Config
from gpt4d.model import registry  # noqa: F401 – registers the families' settings
from tests.support.rank_pool import RankPool, start_forkserver
from tests.support.settings import configured

# A shell that starts the tests in the background makes them and their processes ignore Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config) -> None:
    """Leave the directory of the user, in which pytest-xdist starts its workers, in the processes that run tests."""
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        environment.leave_working_directory()


def pytest_addoption(parser) -> None:
    parser.addoption("--third", type=int, choices=range(3), help="run only a third of the tests marked full: 0, 1 or 2")


def pytest_collection_modifyitems(config, items) -> None:
    """Mark tests that train, which ``make test-fast`` leaves out, and choose the third of the tests marked full."""
    third = config.getoption("third")
    if third is not None:
        left = [item for item in items if item.get_closest_marker("full") and crc32(item.nodeid.encode()) % 3 != third]
        excluded = set(left)
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item not in excluded]
    for item in items:
        if {"ranks", "single_device"} & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.ranks)


def pytest_terminal_summary(terminalreporter) -> None:
    """Print the command that repeats each failed test."""
    failed = [*terminalreporter.stats.get("failed", ()), *terminalreporter.stats.get("error", ())]
    for name in dict.fromkeys(report.nodeid for report in failed):
        terminalreporter.write_line(f"repeat: .venv/bin/python -m pytest -m '' {shlex.quote(name)}")


def pytest_collection_finish(session) -> None:
    """Start the process that forks ranks before the benchmarks' tests start it with their own modules."""
    gc.freeze()  # the modules stay: a collection of garbage only visits objects of tests
    if not session.config.option.collectonly and any(item.get_closest_marker("ranks") for item in session.items):
        start_forkserver()


@pytest.fixture(scope="session")
def ranks():
    pool = RankPool()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> str:
    """Return the glob of a small corpus: 40 documents of words that follow each other by a rule a model can learn."""
    directory = tmp_path_factory.mktemp("corpus")
    draw = random.Random(0)
    words = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa"]
    for document in range(40):
        at, text = draw.randrange(10), []
        for _ in range(200):
            text.append(words[at])
            at = (at + draw.choice((1, 1, 1, 3))) % 10
        (directory / f"{document:02}.txt").write_text(" ".join(text) + ".\n")
    return str(directory / "*.txt")


@pytest.fixture
def tiny(corpus, tmp_path_factory, tmp_path):
    """Return a function from overrides to the configuration of a run that takes seconds, in a directory of the test's.

    It trains on the small corpus, unless an override chooses other ``data``. By default the model is a GPT-2.
    """
    cache = tmp_path_factory.getbasetemp() / "token-cache"  # one for the session: the corpus is tokenized once

    def build(*overrides: str) -> Config:
        text = ["data=text", f"data.path={corpus}", "data.validation_fraction=0.2"]
        return configured(
            [
                *(text if not any(override.startswith("data=") for override in overrides) else ()),
                *(["model=gpt_tiny"] if not any(override.startswith("model=") for override in overrides) else ()),
                "model.layers=2",
                "model.hidden=24",
                "model.heads=4",
                "model.vocab_size=300",
                "model.vocab_multiple=16",
                "model.max_positions=32",
                "data.tokenizer_vocab=300",
                "cluster=local",
                f"data.cache_dir={cache}",
                "train.seq_len=16",
                "train.batch_size=16",
                "train.steps=20",
                "train.validate_every=0",
                "optim.algorithm=adamw",
                "optim.warmup_steps=5",
                "optim.lr=0.005",
                "checkpoint.every=0",
                "logging.every=1",
                "logging.sample_tokens=0",
                f"run.dir={tmp_path / 'run'}",
                *overrides,
            ]
        )

    return build

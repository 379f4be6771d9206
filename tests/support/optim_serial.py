"""The run on one device that the runs of a test module are compared with."""

from collections.abc import Callable, Sequence

import pytest

from gpt4d.config import Config


def serial_fixture(overrides: Sequence[str], train: Callable[[Config], None], read: Callable[[Config], object]):
    """Return a fixture whose value is what ``read`` returns for a run on one device, which trains once."""
    made: list[object] = []

    @pytest.fixture
    def serial(ranks, tiny, tmp_path):
        if not made:
            config = tiny(*overrides, f"run.dir={tmp_path}/serial")
            ranks.run(1, train, config)
            made.append(read(config))
        return made[0]

    return serial

"""A run whose planned memory exceeds its devices ends before it starts, with one line that names settings that fit."""

import re

import pytest

from gpt4d.config import ConfigError
from gpt4d.planner.estimate import GIB
from gpt4d.planner.fitting import Fit
from gpt4d.planner.resolve import resolve
from gpt4d.planner.topology import usable_gib
from gpt4d.validation import validate
from tests.support.commands import TRAIN
from tests.support.jobs import run_command
from tests.support.settings import configured

LARGE = ["model=gpt_1b3", "cluster=perlmutter"]
SMALL = ["cluster=local", "cluster.reserved_gib=0", "cluster.margin=0", "train.batch_size=16"]


def test_a_run_that_does_not_fit_names_the_change_that_does():
    message = r"model=gpt_1b3: a step needs 4.* GiB of a device, and one of perlmutter has 40"
    with pytest.raises(ConfigError, match=message) as error:
        validate(configured(LARGE), 1)
    change = re.search(r"; set (\S+) \(planned", str(error.value))
    assert change, error.value
    assert validate(configured([*LARGE, change[1]]), 1)


def test_a_run_that_no_setting_helps_names_the_fewest_devices_and_their_grid():
    words = ["model=gpt_20b", "model.layers=8", "cluster=perlmutter", "train.activation_checkpointing=full"]
    message = r"use (\d+) device\(s\), the fewest that suffice, with (.*)$"
    with pytest.raises(ConfigError, match=message) as error:
        validate(configured(words), 1)
    found = re.search(message, str(error.value))
    assert found and validate(configured([*words, *found[2].split()]), int(found[1]))


@pytest.mark.parametrize("stages", ["1", "2"])
def test_every_change_fits_on_the_same_devices(stages):
    words = [*SMALL, f"parallel.pipeline.stages={stages}"]
    needed = resolve(configured(words), 2).memory_gib
    tight = [*words, f"cluster.memory_gib={0.6 * needed}"]
    config = configured(tight)
    answer = Fit(resolve(config, 2), config.cluster)
    assert not answer.fits and answer.plan.memory_gib == pytest.approx(needed)
    assert answer.changes()
    for change in answer.changes():
        changed = configured([*tight, *(f"{key}={value}" for key, value in change.settings.items())])
        planned = validate(changed, 2).memory_gib
        assert planned <= usable_gib(changed.cluster) + 1 / GIB
        assert planned == pytest.approx(change.plan.memory_gib)


def test_a_machine_that_is_too_small_for_any_number_names_another():
    with pytest.raises(ConfigError, match=r"no number of its devices suffices; \d+ device\(s\) of cluster=dgx_h100 do"):
        validate(configured(["model=gpt_80b", "cluster=local", "cluster.memory_gib=null", "cluster.host_gib=23"]), 1)


def test_train_py_ends_before_it_prepares_anything(ranks, tmp_path):
    words = f"run.dir={tmp_path / 'run'}", f"data.cache_dir={tmp_path / 'cache'}"
    done = run_command(ranks.context, TRAIN, *LARGE, *words)
    assert done.returncode == 1 and done.stderr.startswith("error: model=gpt_1b3: a step needs 4")
    assert done.stderr.count("\n") == 1 and not any(tmp_path.iterdir())

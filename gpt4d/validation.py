"""The validation of a run: every check that needs no process group, in one call. No torch here."""

from gpt4d.config import Config, check_pipeline, check_run, check_unused, check_values
from gpt4d.evaluation.tasks import check_names, named_as_in_training
from gpt4d.model import registry
from gpt4d.optim.schedule import check_schedule
from gpt4d.planner.fitting import check_memory
from gpt4d.planner.resolve import resolve
from gpt4d.planner.stages import PlanEstimate
from gpt4d.task import registry as tasks
from gpt4d.trackers.run_trackers import check_trackers


def validate(config: Config, world_size: int) -> PlanEstimate:
    """Return the plan on which this configuration trains on ``world_size`` devices.

    Raises ConfigError naming the key, its value and the remedy.
    """
    family = registry.of(config.model)
    check_values(config, family)
    check_pipeline(config)
    tasks.get(family.task).check(config)
    check_run(config)  # whose name may follow from the name of the data
    check_unused(config)
    check_trackers(config)
    if config.train.epochs is None:  # else the data determine the number of steps
        check_schedule(config)
    if config.evaluate.tasks:
        with named_as_in_training():
            check_names(config.evaluate.tasks)
    plan = resolve(config, world_size)
    check_memory(plan, config.cluster)
    return plan

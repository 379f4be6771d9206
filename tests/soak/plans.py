"""The plans on which the soak trains, and the settings of its runs."""

from pathlib import Path
from typing import NamedTuple

from tests.evaluation.offline_tasks import write_tasks
from tests.support.chat import write_tokenizer

_GPT = (
    "model=gpt_tiny model.layers=4 model.hidden=24 model.vocab_size=300 model.vocab_multiple=16 "
    "model.max_positions=16 train.seq_len=16 logging.sample_tokens=0 data.processes=1"
)
SIDE_WORK = "gpt_side_work"
MODELS = {
    "gpt": _GPT,
    SIDE_WORK: f"{_GPT} data.stream=true data.tokenizer={{directory}}/tokenizer logging.trackers=[tensorboard] "
    "evaluate.every=4 evaluate.limit=2 evaluate.tasks=[{directory}/choices.yaml]",
    "unet": "model=unet_tiny model.channels=8 model.multipliers=[1,2] model.blocks_per_level=1 model.image_size=8 "
    "model.attention_at=[] model.groups=4 model.head_size=8 model.timesteps=50 logging.sample_images=0",
}


class SoakPlan(NamedTuple):
    """Overrides on a number of ranks, and the phases that exist on this plan alone.

    ``tied``: ranks of the stages that have the tied weight; None for all ranks.
    """

    ranks: int
    overrides: str
    phases: tuple[str, ...] = ()
    tied: tuple[int, ...] | None = None

    def ranks_of(self, phase: str) -> tuple[int, ...]:
        """Return the ranks that reach a phase."""
        return self.tied if phase == "copy" and self.tied else tuple(range(self.ranks))


_STAGES = "parallel.pipeline.stages=2"
_TIED = ("transfer", "copy")
PLANS = {
    "grid": SoakPlan(2, "parallel.gz=2", ("gather",)),
    "zero": SoakPlan(4, "parallel.gz=2 optim.shard_states=true", ("gather",)),
    "recomputed": SoakPlan(4, "parallel.gx=2 parallel.gy=2 train.activation_checkpointing=full"),
    "stages": SoakPlan(2, _STAGES, _TIED),
    "stages_of_2": SoakPlan(4, f"{_STAGES} parallel.gx=2", _TIED),
    "uneven": SoakPlan(3, f"{_STAGES} parallel.pipeline.stage_grids=[1x1x1x1,1x1x2x1]", _TIED),
    "interleaved": SoakPlan(
        2, f"{_STAGES} parallel.pipeline.schedule=interleaved_1f1b parallel.pipeline.chunks_per_stage=2", _TIED
    ),
    "zero_bubble": SoakPlan(
        3, "parallel.pipeline.stages=3 parallel.pipeline.schedule=zb_h1", (*_TIED, "weight_gradients"), tied=(0, 2)
    ),
    "atp": SoakPlan(2, "parallel.mode=atp parallel.d1=2 parallel.d2=1"),
    "atp_chunks": SoakPlan(4, "parallel.mode=atp parallel.d1=2 parallel.d2=2 parallel.chunks=2"),
}


def settings(model: str, plan: SoakPlan, directory: Path, *overrides: str) -> list[str]:
    """Return the overrides of a run whose steps take a tenth of a second."""
    return [
        *MODELS[model].format(directory=directory).split(), f"data.cache_dir={directory / 'cache'}",
        "train.steps=100000", "train.batch_size=12", "train.validate_every=4", "train.validation_batches=1",
        "optim.schedule_steps=1000", "parallel.timeout_s=2", "checkpoint.every=3", "checkpoint.keep=2",
        "logging.every=1", *plan.overrides.split(), *overrides,
    ]  # fmt: skip


def write_files(directory: Path) -> None:
    """Write the tokenizer and the task of ``SIDE_WORK``."""
    write_tokenizer(directory / "tokenizer")
    write_tasks(directory)


def phases_of(plan: SoakPlan, model: str) -> tuple[str, ...]:
    """Return the phases that only some plans have and this one has. U-Nets have no tied weights."""
    return tuple(phase for phase in plan.phases if model != "unet" or phase != "copy")

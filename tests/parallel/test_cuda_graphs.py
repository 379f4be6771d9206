"""Recorded steps: replays on simulated CUDA graphs give the bits of steps without graphs."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from gpt4d.config import Config, batch_size_at
from gpt4d.model import registry
from gpt4d.parallel.cuda_graphs import EAGER, StepGraphs
from gpt4d.parallel.grid import Grid
from gpt4d.step import TrainStep
from gpt4d.validation import validate
from tests.simulated_gpu.training import RandomImages, RandomText
from tests.support.graph_replay import replayed_graphs
from tests.support.grids import full
from tests.support.settings import configured
from tests.support.stages import connected_stage

STEPS = 5  # two steps without graphs, a recording, a replay, and a recording after an evaluation
TEXT = (
    "model.layers=2", "model.hidden=24", "model.heads=4", "model.vocab_size=300", "model.vocab_multiple=16",
    "model.max_positions=16", "train.seq_len=12", "train.batch_size=8", "data.workers=0", "optim.warmup_steps=1",
)  # fmt: skip
GPT = ("model=gpt_tiny", *TEXT, "model.dropout=0.1")
LLAMA = ("model=llama_tiny", *TEXT, "model.key_value_heads=2", "model.head_size=8", "model.inner=32")
UNET = (
    "model=unet_tiny", "model.channels=16", "model.multipliers=[1]", "model.blocks_per_level=1", "model.image_size=8",
    "model.attention_at=[8]", "model.head_size=4", "model.groups=2", "train.batch_size=8",
)  # fmt: skip
SPLIT = "train.micro_batch_size=2"
GRID = ("parallel.gx=2", "parallel.gz=2", "train.micro_batch_size=2")
CHUNKS = ("parallel.chunks=2", "train.activation_checkpointing=selective")
PIPELINE = "parallel.pipeline."
STAGES = (PIPELINE + "stages=2", PIPELINE + "microbatches=4")
INTERLEAVED = ("model.layers=4", PIPELINE + "schedule=interleaved_1f1b", PIPELINE + "chunks_per_stage=2")


def train(config: Config, cuda_graphs: bool, steps: int) -> tuple[tuple, tuple | None]:
    """Train some steps as a rank, with an evaluation before the last step.

    Return losses, gradient norms, the losses of sources, and the collectives and sent bytes of each axis; and the
    numbers of captured and of launched graphs.
    """
    plan = validate(config, dist.get_world_size())
    config, stage = plan.config, connected_stage(plan, torch.float32, ranks_per_host=4)
    task = (RandomText if registry.of(config.model).task == "language_modeling" else RandomImages)(config)
    task.connect(stage, plan.micro_batch_size(plan.stages[stage.index]))
    numbers, first = [], config.train.batch_size
    with replayed_graphs(stage.grid) if cuda_graphs else nullcontext() as simulated:
        step = TrainStep(stage, task.compute, config.optim, config.parallel.overlap.data, cuda_graphs=cuda_graphs)
        sample = first
        for number in range(1, steps + 1):
            if number == steps:
                numbers.append(step.evaluate(task.validation["held_out"].batches(0), plan.microbatches).item())
            size = batch_size_at(config.train, sample)
            units = size * task.units_per_sample
            result = step(task.batches(sample), plan.microbatches_of(size), units, lr=1e-2)
            sample += size
            numbers += [result.loss.item(), result.norm.item()]
        step.reducer.wait_params()
    numbers += task.training_values(first, sample).get("sources", {}).values()
    if stage.exchange:
        stage.wait_for_copies()
        stage.exchange.close()
    task.close()
    collectives = {name: (axis.traffic.num_started, axis.traffic.bytes) for name, axis in stage.axes.items()}
    return (numbers, collectives), (simulated.captures, simulated.launches) if simulated else None


def with_and_without_graphs(config: Config, steps: int = STEPS) -> tuple[tuple, tuple]:
    return train(config, cuda_graphs=False, steps=steps), train(config, cuda_graphs=True, steps=steps)


BLEND = "data.blend={{{directory}/a: 2, {directory}/b: 1}}"
CASES = {
    "llama": (1, (*LLAMA, SPLIT, "train.precision=bf16", "train.activation_checkpointing=full")),
    "gpt grid": (2, (*GPT, "parallel.gz=2", SPLIT, *CHUNKS, "optim.shard_states=true")),
    "blend": (1, (*GPT, SPLIT, "train.loss_chunks=2", "data=blend", BLEND)),
    "gpt stages": (2, (*GPT, *STAGES, PIPELINE + "schedule=1f1b")),
}
FULL_CASES = {
    "blend grid": (2, (*GPT, "parallel.gx=2", SPLIT, "train.loss_chunks=2", "data=blend", BLEND)),
    "gpt larger grid": (4, (*GPT, *GRID, *CHUNKS)),
    "gpt stages on grids": (4, (*GPT, *STAGES, "parallel.gz=2", PIPELINE + "schedule=1f1b", "optim.shard_states=true")),
    "gpt": (1, (*GPT, SPLIT)),
    "llama grid": (2, (*LLAMA, "parallel.gx=2", SPLIT, "parallel.chunks=2", "train.loss_chunks=2")),
    "llama stages": (2, (*LLAMA, *STAGES, PIPELINE + "schedule=zb_h1")),
    "unet": (1, (*UNET, "train.micro_batch_size=4")),
    "unet grid": (4, (*UNET, "parallel.gx=2", "parallel.gy=2", SPLIT)),
    "unet stages": (2, (*UNET, PIPELINE + "stages=2", PIPELINE + "microbatches=2")),
    "chunks": (1, (*GPT, SPLIT, "parallel.chunks=2", "model.attention_dropout=0.1")),
    "cache": (4, (*LLAMA, *GRID, "parallel.cache_layers=all", "parallel.cache_scope=step")),
    "states": (4, (*LLAMA, "parallel.gy=2", "parallel.gdata=2", "optim.shard_states=true", SPLIT)),
    "no overlap": (4, (*GPT, *GRID, "parallel.overlap.all_gather=false", "parallel.overlap.reduce_scatter=false")),
    "gpipe": (2, (*GPT, *STAGES, PIPELINE + "schedule=gpipe")),
    "eager": (2, (*GPT, *STAGES)),
    "eager w": (2, (*GPT, *STAGES, PIPELINE + "schedule=eager_1f1b_w")),
    "interleaved": (4, (*GPT, *STAGES, *INTERLEAVED, "parallel.gx=2")),
}


@pytest.mark.parametrize(
    ("world_size", "settings"),
    [(pytest.param if key in CASES else full)(*case, id=key) for key, case in (CASES | FULL_CASES).items()],
)
def test_replayed_steps_have_the_bits_and_the_bytes_of_steps_without_graphs(ranks, world_size, settings, tmp_path):
    for name in "ab":  # sources of the blend, whose tokens are random
        (tmp_path / name).mkdir()
        (tmp_path / name / "header.json").touch()
    settings = [word.format(directory=tmp_path) if word == BLEND else word for word in settings]
    for (eager, _), (replayed, (captured, launched)) in ranks.run(
        world_size, with_and_without_graphs, configured([*settings])
    ):
        assert replayed == eager
        assert 2 * launched == 3 * captured  # three steps, of which two are recorded
        assert captured == 2 or PIPELINE in str(settings)


@pytest.mark.parametrize("settings", [(), full((SPLIT,)), full(STAGES)], ids=["whole", "split", "stages"])
def test_a_step_of_another_batch_size_is_recorded_again(ranks, settings):
    config = configured([*GPT, *settings, "train.batch_ramp=[[0,4],[24,8]]"])
    world_size = 2 if PIPELINE in str(settings) else 1
    for (eager, _), (replayed, graphs) in ranks.run(world_size, with_and_without_graphs, config, 4 + STEPS):
        assert replayed == eager
        assert graphs == (3, 5) or world_size == 2


def test_an_error_while_a_step_is_recorded_leaves_nothing_to_release():
    def forward_backward(batches, microbatches, divisor, mode=EAGER):
        if mode is not EAGER:
            raise MemoryError
        return torch.zeros(())

    stage = SimpleNamespace(weights=SimpleNamespace(device=torch.device("cpu")), exchange=None, grid=())
    with replayed_graphs(Grid.single_device()):
        graphs = StepGraphs(stage, SimpleNamespace(wait_params=lambda: None), forward_backward)
        for _ in range(2):
            graphs.run([], 1, 1.0)
        with pytest.raises(MemoryError):
            graphs.run([], 1, 1.0)
        graphs.release()  # the end of a run, whose error must not be replaced by another one

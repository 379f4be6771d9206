"""Fine-tuning on conversations equals a plain loop over single conversations, on every plan and after a resume.

With GPT4D_MODEL=DIR, a directory of transformers such as HuggingFaceTB/SmolLM2-135M-Instruct, its model as well:

    GPT4D_MODEL=DIR python -m pytest -m full tests/task/test_finetuning.py -k pretrained -s

prints the largest relative difference of the losses on each plan. It takes minutes, 4 GiB of memory and 3 GiB of disk.
"""

import os
import shutil

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from gpt4d.checkpoint import importer
from gpt4d.checkpoint.importer import import_model
from gpt4d.config import GridSizes
from gpt4d.data.corpus import corpus as prepared
from gpt4d.data.sampler import PackedSequences
from gpt4d.parallel.layers.routing import Routers
from tests.support.chat import CONVERSATIONS, chat_overrides
from tests.support.grids import build_model, fill_from_hf, full, hf_model, on_grid, to_hf, train_in_rank
from tests.support.model_oracles import in_files, library_model, router_states_and_loss
from tests.support.rank_pool import RankFailure
from tests.support.settings import configured
from tests.support.stages import check_step, connected_task, own_stage, own_step
from tests.support.task_oracles import summed_loss, validations
from tests.support.training import losses_and_norms, plain_torch_run

STEPS = ["train.steps=6", "train.batch_size=8", "train.validate_every=6", "optim.warmup_steps=2"]
LLAMA = ("model=llama_tiny", "model.key_value_heads=2", "model.head_size=8", "model.inner=40", "model.tied=true")


@pytest.fixture(scope="module")
def overrides(tmp_path_factory):
    return [*chat_overrides(tmp_path_factory.mktemp("sft")), *STEPS]


def plain_run(config, model):
    """Train a model of transformers in a plain loop.

    Returns the losses and norms of the steps, and the loss of the held-out conversations after them.
    """
    files, train = prepared(config.data).first, config.train
    packed = PackedSequences(files, "train", train.seq_len, train.seed, shuffle=True)

    def loss_of(model, step):
        positions = packed.order.positions(np.arange(train.batch_size) + step * train.batch_size)
        documents = np.concatenate([packed.documents[slice(*packed.bounds[at : at + 2])] for at in positions])
        total, count = summed_loss(model, files, "train", documents.tolist())
        return total / count

    losses, norms = plain_torch_run(config, model, loss_of)
    held_out = range(files.count("validation", "documents"))
    lengths = np.diff(files.document_ends("validation"), prepend=0)
    fitting = [document for document in held_out if lengths[document] <= train.seq_len + 1]
    with torch.no_grad():
        total, count = summed_loss(model, files, "validation", fitting)
    return losses, norms, total.item() / count


def results(run_dir):
    (held_out,) = validations(run_dir)
    losses, norms = losses_and_norms(run_dir)
    return losses, norms, held_out["loss"]


@pytest.fixture(scope="module")
def serial(ranks, overrides, tmp_path_factory):
    """Return a function from ``tiny`` and a model to the results of a run on one device, which trains once."""
    made = {}

    def run(tiny, *model):
        if model not in made:
            directory = f"run.dir={tmp_path_factory.mktemp('serial')}"
            config = tiny(*model, *overrides, "checkpoint.every=3", directory)
            ranks.run(1, train_in_rank, config)
            made[model] = config, results(config.run.dir)
        return made[model]

    return run


@pytest.mark.parametrize("model", [(), LLAMA], ids=["gpt2", "llama"])
def test_fine_tuning_equals_a_plain_loop_over_single_conversations(serial, tiny, model):
    config, (losses, norms, held_out) = serial(tiny, *model)
    start = build_model(config.model, GridSizes(), torch.float32, seed=config.train.seed)
    expected_losses, expected_norms, expected_held_out = plain_run(config, hf_model(start))
    assert len(losses) == 6 and losses == pytest.approx(expected_losses, rel=1e-5)
    assert norms == pytest.approx(expected_norms, rel=1e-4)
    assert held_out == pytest.approx(expected_held_out, rel=1e-5)


PLANS = [
    (GridSizes(2, 2), ()),
    full(GridSizes(1, 1, 2, 2), ()),
    full(GridSizes(2, 1, 2), ("parallel.sequence_parallel=true", "train.loss_chunks=2")),
    (GridSizes(1, 1, 2), ("parallel.pipeline.stages=2", "parallel.pipeline.microbatches=4", "train.loss_chunks=2")),
    full(GridSizes(2), ("parallel.mode=atp", "parallel.d1=2", "parallel.d2=1")),
    full(GridSizes(), ("train.micro_batch_size=2", "train.activation_checkpointing=full")),
    full(GridSizes(1, 1, 1, 2), ("train.micro_batch_size=2", "parallel.chunks=2", "data.workers=0")),
]


@pytest.mark.parametrize(("sizes", "settings"), PLANS)
def test_the_plan_does_not_change_the_losses_of_fine_tuning(ranks, serial, overrides, tiny, sizes, settings):
    grid = () if any("atp" in setting for setting in settings) else on_grid(sizes)
    config = tiny(*overrides, *grid, *settings)
    stages = config.parallel.pipeline.stages or 1
    ranks.run(sizes.devices * stages, train_in_rank, config)
    _, (losses, norms, held_out) = serial(tiny)
    found = results(config.run.dir)
    for values, expected in zip(found, (losses, norms, held_out), strict=True):
        assert values == pytest.approx(expected, rel=1e-5)


MIXTURE = (
    "model=moe_tiny", "model.key_value_heads=4", "model.head_size=6", "model.inner=24", "model.experts=12",
    "model.experts_per_token=3", "model.router_z_loss=0.05", "model.balance_rate=0.5", "model.qk_norm=all",
)  # fmt: skip


def mixture_step(config, world_size, state):
    """On a rank: the results of ``own_step`` for the first conversations, and the tokens of each router's experts."""
    plan, stage = own_stage(config, world_size)
    fill_from_hf(stage.module, state)
    task, routers = connected_task(config, plan, stage), Routers(stage.module, stage.routers)
    found = own_step(plan, stage, task.compute, lambda: task.batches(0), *task.counts(0), routers)
    totals = stage.grid.world.all_reduce(routers.totals())
    return found, totals[:, : config.model.experts]


MIXTURE_PLANS = [
    (1, "train.micro_batch_size=2 train.activation_checkpointing=full "),
    (4, "parallel.gx=2 parallel.gz=2 parallel.sequence_parallel=true parallel.chunks=2 "),
    (2, "parallel.gy=2 train.activation_checkpointing=selective "),
    (2, "parallel.pipeline.stages=2 parallel.pipeline.microbatches=4 "),
    (4, "parallel.gz=4 parallel.context=2 "),
]
EXAMPLES = f"data.path={CONVERSATIONS} train.seq_len=384 model.max_positions=384 train.batch_size=8"


@pytest.mark.parametrize(
    ("devices", "words"), MIXTURE_PLANS[:2] + [full(devices, plan + EXAMPLES) for devices, plan in MIXTURE_PLANS]
)
def test_losses_of_routers_are_means_over_the_tokens_of_conversations(ranks, tiny, overrides, devices, words):
    config = tiny(*overrides, *MIXTURE, *words.split())
    model, files = library_model(config.model), prepared(config.data).first
    packed = PackedSequences(files, "train", config.train.seq_len, config.train.seed, shuffle=True)
    logits, total, trained = [], 0, 0
    for position in packed.order.positions(np.arange(config.train.batch_size)).tolist():
        room = config.train.seq_len  # the last token of a full sequence is only predicted
        for document in packed.documents[slice(*packed.bounds[position : position + 2])].tolist():
            start, stop = packed.starts[document], packed.ends[document]
            ids, shown = (torch.from_numpy(part[start:stop].astype(np.int64)) for part in (packed.tokens, packed.mask))
            answers = model(ids[None], output_router_logits=True)
            logits.append([each[:room] for each in answers.router_logits])
            room -= len(ids)
            total += F.cross_entropy(answers.logits[0, :-1][shown[1:] > 0], ids[1:][shown[1:] > 0], reduction="sum")
            trained += int(shown[1:].sum())
    assert packed.counts(np.arange(config.train.batch_size)) == (trained, sum(len(each[0]) for each in logits))
    states, of_routers = router_states_and_loss(config.model, [torch.cat(each) for each in zip(*logits, strict=True)])
    loss = total / trained
    (loss + of_routers).backward()
    grads = in_files({name: p.grad for name, p in model.named_parameters()}, config.model)
    found = ranks.run(devices, mixture_step, config, devices, states | in_files(model.state_dict(), config.model))
    answers, (counts, *_) = zip(*found, strict=True)
    check_step(answers, [loss.item()] * 2, grads, lambda wholes: to_hf(wholes, config.model))
    assert torch.allclose(counts, torch.stack([*states.values()]) * sum(len(each[0]) for each in logits))


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory):
    """Return the overrides of a run that trains the user's model, and the results of a plain loop of transformers."""
    from transformers import AutoModelForCausalLM

    source, directory = os.environ["GPT4D_MODEL"], tmp_path_factory.mktemp("pretrained")
    command = importer.commands(directory / "run", import_model(source, directory / "run"))["conversations"]
    overrides = [word for word in command.split() if "=" in word and not word.startswith(("data.path", "run.dir"))]
    overrides += [
        f"data.path={CONVERSATIONS}", f"data.cache_dir={directory / 'cache'}", "train.epochs=null", "train.steps=20",
        "train.batch_size=2", "train.seq_len=256", "train.validate_every=0", "optim.warmup_steps=5", "cluster=local",
        "checkpoint.every=0", "logging.every=1", "logging.sample_tokens=0", "train.micro_batch_size=null",
    ]  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    # transformers drops the gradient of the padding token's row. It is SmolLM2's <|im_end|>, which ends all messages.
    model.get_input_embeddings().padding_idx = None
    yield overrides, plain_run(configured(overrides), model)
    shutil.rmtree(directory)  # gigabytes


PRETRAINED_PLANS = [
    (1, ()),
    (3, ("parallel.gx=3",)),  # SmolLM2 has nine heads
    (2, ("parallel.gz=2",)),
    (2, ("parallel.pipeline.stages=2", "parallel.pipeline.microbatches=2")),
]


@pytest.mark.full
@pytest.mark.skipif("GPT4D_MODEL" not in os.environ, reason="GPT4D_MODEL names no directory")
@pytest.mark.parametrize(("world_size", "plan"), PRETRAINED_PLANS)
def test_a_pretrained_model_has_the_losses_of_transformers_on_every_plan(ranks, pretrained, tmp_path, world_size, plan):
    overrides, expected = pretrained
    config = configured([*overrides, *plan, f"run.dir={tmp_path / 'run'}"])
    ranks.run(world_size, train_in_rank, config)
    found = results(config.run.dir)
    shutil.rmtree(config.run.dir)  # gigabytes
    losses, expected_losses = np.array([*found[0], found[2]]), np.array([*expected[0], expected[2]])
    differences = np.abs(losses / expected_losses - 1)
    print(f"\n{' '.join(plan) or 'one device'}: {losses[0]:.4f} to {losses[-2]:.4f}, at most {differences.max():.1e}")
    assert len(losses) == 21 and losses[-2] < losses[0] and differences.max() < 1e-5
    assert found[1] == pytest.approx(expected[1], rel=1e-4)


def test_a_resumed_fine_tuning_has_equal_bits(ranks, serial, overrides, tiny):
    config, (losses, norms, held_out) = serial(tiny)
    checkpoint = f"checkpoint.resume={config.run.dir}/checkpoints/step_00000003"
    resumed = tiny(*overrides, checkpoint)
    ranks.run(1, train_in_rank, resumed)
    assert results(resumed.run.dir) == (losses[3:], norms[3:], held_out)


def test_the_error_for_long_conversations_names_the_length(ranks, overrides, tiny):
    for setting, message in (
        ("data.skip_long=false", r"train\.seq_len=24: conversation \d+ of train in .* has \d+ tokens, more than .* it"),
        ("train.seq_len=4", r"train\.seq_len=4: a sequence takes 5 tokens, and every conversation in .* more; raise"),
    ):
        with pytest.raises(RankFailure, match=message):
            ranks.run(1, train_in_rank, tiny(*overrides, "train.seq_len=24", setting))


def test_cuda_graphs_are_rejected_for_conversations(ranks, overrides, tiny):
    before = ["data=tokens", f"data.path={prepared(tiny(*overrides).data).first.directory}"]
    for data in (overrides, before):
        given = tiny(*data, "train.seq_len=16", "cluster=dgx_h100", "train.cuda_graphs=true")
        with pytest.raises(RankFailure, match=r"train\.cuda_graphs=true: .* gives? attention and loss other shapes"):
            ranks.run(1, train_in_rank, given)


def summary_and_sample(config):
    from gpt4d.training.trainer import Trainer
    from gpt4d.validation import validate

    trainer = Trainer(validate(config, 1), torch.device("cpu"))
    try:
        return trainer.task.summary(), trainer.task.sample()
    finally:
        trainer.task.close()
        trainer.checkpoints.close()


def test_the_summary_counts_left_out_conversations_and_the_sample_continues_a_prompt(ranks, overrides, tiny):
    config = tiny(*overrides, "train.seq_len=24", "logging.sample_tokens=3")
    ((summary, sample),) = ranks.run(1, summary_and_sample, config)
    files = prepared(config.data).first
    lengths = [np.diff(files.document_ends(split), prepend=0) for split in ("train", "validation")]
    long = int(sum((each > 25).sum() for each in lengths))
    assert 0 < long < 60 and f"{60 - long} conversations fill " in summary
    assert f"; {long} of more than 25 tokens are left out, raise train.seq_len to use them" in summary
    assert f"{files.count('train', 'trained'):,} and {files.count('validation', 'trained'):,} of them have" in summary
    assert sample.message.startswith("\nuser\n") and "assistant\n" in sample.message

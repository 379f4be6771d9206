"""Low-rank adapters train as in peft, on every plan, and are exchanged with peft."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig as PeftConfig
from peft import PeftModel, get_peft_model
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig

from gpt4d.checkpoint import adapter_files, exporter
from gpt4d.checkpoint.checkpoint_dir import Checkpoint
from gpt4d.checkpoint.importer import import_model
from gpt4d.checkpoint.space import check_space
from gpt4d.config import ConfigError, GridSizes, LoraConfig
from gpt4d.model import registry
from gpt4d.parallel.grid import Grid
from gpt4d.planner.estimate import Estimate
from gpt4d.step import TrainStep, build_stage
from gpt4d.task.language import LanguageModeling
from gpt4d.validation import validate
from tests.exactness.cases import draw
from tests.exactness.comparison import check, microbatches
from tests.support.grids import full, metric_lines, on_grid, train_in_rank
from tests.support.settings import configured

RATE, STEPS = 1e-3, 20
LORA = ["lora.rank=3", "optim.algorithm=adamw", "train.batch_size=4", "train.seq_len=16"]
SETTINGS = {
    "gpt_tiny": ["model.vocab_size=4096", "model.dropout=0", "model.attention_dropout=0"],
    "olmo2_tiny": ["model.vocab_size=4096"],
    "moe": ["model.layers=2", "model.qk_norm=heads", "model.balance_rate=0", "lora.targets=[qkv,output]"],
}


def serial_stage(name, *overrides):
    config = configured([f"model={name}", *LORA, *SETTINGS.get(name, ()), *overrides])
    plan = validate(config, 1)
    return plan, build_stage(plan, Grid(), torch.device("cpu"), torch.float64)


def reader(stage):
    """Return a function from the name of a parameter to its values without padding."""
    named = dict(stage.module.named_parameters())

    def read(name):
        parameter = named[name]
        return parameter.detach()[tuple(map(slice, parameter.spec.stored_shape))].clone()

    return read


def model_of_peft(stage, directory):
    """Return transformers' model with the same weights and peft's adapters, both read from files in our names."""
    config, read = stage.module.spec.config, reader(stage)
    base = replace(config, lora=None)
    adapter = registry.of(base).hugging_face()
    state = {}
    for name in registry.describe(base).parameters:
        state |= zip(adapter.names(name, base), adapter.to_hf(name, read(name), base), strict=True)
    save_file(state, directory / "model.safetensors", {"format": "pt"})
    settings = adapter.hf_config(base)
    settings.save_pretrained(directory)
    settings._experts_implementation = "eager"  # in float64
    model = AutoModelForCausalLM.from_pretrained(directory, config=settings, dtype=torch.float64)
    adapter_files.write(directory, read, config)
    return PeftModel.from_pretrained(model, str(directory), is_trainable=True, autocast_adapter_dtype=False).double()


def beside_peft(name, directory):
    """On a rank: return our losses and peft's in float64, and the largest relative difference of a merged weight."""
    plan, stage = serial_stage(name)
    settings, config = plan.config.optim, plan.config.model
    theirs = model_of_peft(stage, directory)
    trained = [parameter for parameter in theirs.parameters() if parameter.requires_grad]
    elements = [p.numel() for p in stage.module.parameters() if not p.spec.frozen]
    assert sum(elements) == sum(parameter.numel() for parameter in trained)
    betas = settings.beta1, settings.beta2
    optimizer = torch.optim.AdamW(trained, RATE, betas, settings.epsilon, settings.weight_decay)
    step = TrainStep(stage, partial(LanguageModeling.compute, None), settings)
    losses: tuple[list[float], list[float]] = [], []
    for number in range(STEPS):
        (batch,) = microbatches(plan, stage, number)
        result = step([batch], 1, batch.targets.numel(), RATE)
        loss = F.cross_entropy(theirs(batch.inputs["ids"]).logits.flatten(0, 1), batch.targets.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, settings.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        losses[0].append(result.loss.item())
        losses[1].append(loss.item())
    state, base, difference = theirs.merge_and_unload().state_dict(), replace(config, lora=None), 0.0
    adapter, read = registry.of(base).hugging_face(), adapter_files.merging(reader(stage), config)
    for parameter in registry.describe(base).parameters:
        ours = adapter.to_hf(parameter, read(parameter), base)
        for key, tensor in zip(adapter.names(parameter, base), ours, strict=True):
            if ".experts." in key:  # transformers' models in memory have other names of experts than files
                continue
            difference = max(difference, ((tensor - state[key]).norm() / state[key].norm()).item())
    return *losses, difference


@pytest.mark.parametrize("name", ["llama_tiny", "gpt_tiny", "moe", full("olmo2_tiny"), full("gemma3_tiny")])
def test_losses_and_merged_weights_equal_those_of_peft(ranks, tmp_path, name):
    ((ours, theirs, difference),) = ranks.run(1, beside_peft, name, tmp_path)
    # Most models of transformers compute norms in float32 even if their weights are float64.
    assert ours == pytest.approx(theirs, rel=1e-10 if name == "gpt_tiny" else 1e-5) and ours[-1] < ours[0]
    assert difference < (1e-6 if name == "gpt_tiny" else 1e-5)  # merged weights are float32


SEEDS = (151, 155, 161, 164, 166)  # stages of unequal grids, x·y·z·data, ATP
MORE_SEEDS = [range(first, first + 12) for first in range(3000, 3060, 12)]


@pytest.mark.parametrize("seeds", [SEEDS, *map(full, MORE_SEEDS)], ids=lambda seeds: str(seeds[0]))
def test_the_plan_does_not_change_the_training_of_adapters(ranks, seeds):
    trained = 0
    for seed in seeds:
        case = draw(seed)
        # A norm of one feature has no gradient, so the gradients of a model with one feature cancel.
        if "unet" in case.family or case.family == "utransformer" or case.shared["model.hidden"] == 1:
            continue
        targets = ["[qkv,output,up,down]", "[qkv]", "[down,up]"][seed % 3]
        shared = {**case.shared, "lora.rank": 2 + seed % 3, "lora.targets": targets}
        for key in ("optim.algorithm", "optim.muon.epsilon"):  # adapters train with AdamW only
            shared.pop(key, None)
        case = replace(case, shared=shared)
        result = check(ranks, case)
        assert not result.problem, f"{case}: {result.problem}"
        trained += not result.rejection
    assert trained


MIXTURE = ["model=moe", "model.experts=4", "model.inner=16", "model.head_size=6", "model.key_value_heads=4"]


@pytest.mark.parametrize(
    ("model", "targets", "grid"),
    [([], "[qkv,output,up,down]", GridSizes(2)), full(MIXTURE, "[qkv,output]", GridSizes(1, 1, 4))],
    ids=["gpt", "moe"],
)
def test_a_run_starts_from_a_model_without_adapters_and_resumes_on_another_grid(
    ranks, tiny, tmp_path, model, targets, grid
):
    base, run, serial = (tmp_path / name for name in ("base", "run", "serial"))
    ranks.run(1, train_in_rank, tiny(*model, "train.steps=1", f"run.dir={base}"))
    lora = [*model, "lora.rank=2", f"lora.targets={targets}", f"checkpoint.init={base}", "optim.schedule_steps=4"]
    lora += ["train.steps=4", "optim.ema_decay=0.5"]
    ranks.run(1, train_in_rank, tiny(*lora, f"run.dir={serial}"))
    short = tiny(*lora, f"run.dir={run}", "train.steps=2", *on_grid(grid))
    ranks.run(grid.devices, train_in_rank, short)
    ranks.run(2, train_in_rank, tiny(*lora, f"run.dir={run}", "parallel.pipeline.stages=2"))
    losses = [[line["loss"] for line in metric_lines(directory)] for directory in (serial, run)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5) and len(losses[0]) == 4
    first, last = (Checkpoint.open(directory).files for directory in (base, run))
    for name in first.tensors:
        if name.startswith("model.") and not name.endswith(".router.state"):  # loads follow the batches
            assert torch.equal(first.global_tensor(name), last.global_tensor(name)), "a frozen weight has changed"
    assert not any(name.startswith("optim.") and "lora" not in name for name in last.tensors)
    size = sum(4 * math.prod(tensor.shape) for tensor in last.tensors.values())  # all in float32 on the CPU
    assert check_space(validate(short, grid.devices)).checkpoint == size


def test_adapters_of_peft_are_imported_and_exported_without_a_change(tmp_path):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=50, num_hidden_layers=2, max_position_embeddings=32, **sizes)
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path / "base")
    targets = ["q_proj", "v_proj", "down_proj"]
    settings = PeftConfig(r=3, lora_alpha=5, target_modules=targets, init_lora_weights=False)
    theirs = get_peft_model(model, settings).eval()
    theirs.save_pretrained(tmp_path / "adapter")
    import_model(str(tmp_path / "base"), tmp_path / "run", "none", str(tmp_path / "adapter"))
    checkpoint = Checkpoint.open(tmp_path / "run")
    assert checkpoint.meta.model.lora == LoraConfig(3, 5.0, ["qkv", "down"])
    ids = torch.randint(0, 50, (2, 12))
    with torch.no_grad():
        expected = theirs(ids).logits
        exporter.export(checkpoint, tmp_path / "merged")
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
        assert torch.allclose(merged(ids).logits, expected, atol=1e-5)
        exporter.export_adapter(checkpoint, tmp_path / "ours")
        base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
        ours = PeftModel.from_pretrained(base, tmp_path / "ours").eval()
        assert torch.allclose(ours(ids).logits, expected, atol=1e-5)


def test_planned_memory_of_adapters_is_below_half_of_the_memory_of_full_fine_tuning():
    smollm2 = [
        "model=llama_tiny", "model.layers=30", "model.hidden=576", "model.heads=9", "model.key_value_heads=3",
        "model.head_size=64", "model.inner=1536", "model.vocab_size=49152", "model.max_positions=2048",
        "train.seq_len=512", "train.batch_size=1", "cluster=perlmutter", "train.activation_checkpointing=full",
        "train.loss_chunks=8",
    ]  # fmt: skip
    needed = [Estimate(configured([*smollm2, *lora]), GridSizes()) for lora in ([], ["lora.rank=16"])]
    needed = [estimate.memory_gib(1) - estimate.reserved_gib for estimate in needed]
    assert needed[1] < 0.45 * needed[0]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("model=unet_tiny lora.rank=4", "lora.rank=4: .*unet"),
        ("lora.rank=4 train.precision=fp8", "lora.rank=4"),
        ("lora.rank=4 optim.algorithm=muon", "^optim.algorithm=muon: lora.rank=4 freezes .*; use train=finetune, or "),
        ("lora.targets=[qkv]", "lora.targets"),
        ("lora.rank=4 lora.targets=[q_proj]", r"^lora.targets\[0\]=q_proj: use one of qkv, output, up, down"),
        ("lora.rank=4 lora.targets=[]", r"lora.targets=\[\]"),
        (
            "model=moe model.layers=2 lora.rank=4",
            r"^lora.targets=\[qkv,output,up,down\]: adapters of experts are not .*; set lora.targets=\[qkv,output\]",
        ),
    ],
)
def test_mistakes_are_reported_in_one_line(overrides, message):
    with pytest.raises(ConfigError, match=message) as raised:
        validate(configured(["model=gpt_tiny", "optim.algorithm=adamw", *overrides.split()]), 1)
    assert "\n" not in str(raised.value)

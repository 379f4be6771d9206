"""The count of FLOPs and bytes of a step's operations."""

from dataclasses import replace
from unittest.mock import patch

import pytest

from benchmarks.experiments.operations import planned, read_settings, run
from benchmarks.laboratory.kernel_counter import count
from gpt4d.config import ConfigError
from gpt4d.parallel.layers import loss
from gpt4d.parallel.symbolic.tensor import SymbolicTensor
from tests.parallel.counting_device import CountingDevice
from tests.support.grids import full

SETTINGS = ["model.layers=2", "train.batch_size=4", "optim.algorithm=adamw"]
FAMILIES = ["gpt_tiny", "llama_tiny", "olmo2_tiny", "gemma3_tiny", "moe_tiny"]


def step(*settings: str):
    return read_settings([*SETTINGS, "cluster=dgx_h200", *settings]).config


def test_products_have_six_flops_for_each_weight_and_token():
    config = step("model=gpt_125m", "cluster.memory_gb_s=1e9", "cluster.matmul_tflops=1")
    counter = count(config, compiled=False)
    weights = 2 * 12 * 768 * 768 + config.model.padded_vocab_size * 768
    assert counter.seconds["products"] * 1e12 == pytest.approx(6 * weights * 4 * 1024)
    assert counter.kernels["products"] == 3 * (2 * 4 + 1)


def test_grouped_products_have_six_flops_for_each_weight_of_a_tokens_experts():
    config = step("model=moe_tiny", "cluster.memory_gb_s=1e9", "cluster.matmul_tflops=1")
    model, tokens = config.model, 4 * config.train.seq_len
    experts = 3 * 2 * model.hidden * model.inner * model.experts_per_token
    dense, fewer = (count(c, compiled=False) for c in (config, replace(config, model=replace(model, inner=16))))
    saved = experts * (model.inner - 16) / model.inner
    assert (dense.seconds["products"] - fewer.seconds["products"]) * 1e12 == pytest.approx(6 * saved * tokens)


def test_compiled_functions_read_their_arguments_and_write_their_results_once():
    config = step("model=llama_160m", "cluster.memory_gb_s=1")
    eager, compiled = count(config, compiled=False), count(config, compiled=True)
    # SwiGLU reads gate and up and writes one tensor; its backward reads three and writes two. All are bf16.
    elements = 4 * config.train.seq_len * config.model.inner
    assert compiled.seconds["activations"] * 1e9 == pytest.approx(2 * (3 + 5) * 2 * elements)
    changed = {"norms", "loss", "activations", "queries, keys and values"}
    assert {kind for kind in eager.seconds if compiled.seconds[kind] < eager.seconds[kind]} == changed
    assert all(compiled.seconds[kind] == eager.seconds[kind] for kind in eager.seconds.keys() - changed)


@pytest.mark.parametrize(("compiled", "blocks"), [(True, 1), (False, 7)], ids=["compiled", "eager"])
def test_a_gpu_computes_the_loss_of_gpt_125m_in_one_block_compiled_and_in_few_blocks_eager(compiled, blocks):
    config = step("model=gpt_125m", "train.batch_size=32")
    for name, kernel in (("sum_of_exponentials", loss.sums_of_exponentials), ("write_softmax", loss.softmax_)):
        with patch.object(loss, name, wraps=getattr(loss, name)) as calls:
            count(config, compiled)
        device = CountingDevice()
        device.compiled = compiled
        planned = kernel.blocks(SymbolicTensor(device, (32 * 1024, config.model.padded_vocab_size), "bfloat16"))
        assert calls.call_count == planned == blocks


@pytest.mark.parametrize(
    ("recomputed", "model"),
    [
        *(("none", model) for model in FAMILIES),
        ("selective", "gpt_tiny"),
        ("full", "llama_tiny"),
        *(full(recomputed, model) for recomputed in ("none", "selective", "full") for model in ("gpt_1b3", "llama_1b")),
    ],
)
def test_the_planner_expects_the_time_of_the_operations_of_every_family(recomputed, model):
    length = "train.seq_len=256" if model in FAMILIES else "train.seq_len=1024"
    config = step(f"model={model}", length, f"train.activation_checkpointing={recomputed}")
    for compiled in (False, True):
        counter = count(config, compiled)
        assert planned(config, compiled) == pytest.approx(counter.seconds.total(), rel=0.02)
        assert counter.seconds["other"] < 0.02 * counter.seconds.total()


def test_the_command_reports_the_kinds_of_operations_of_a_mixture_of_experts(capsys):
    (results,) = run(read_settings([*SETTINGS, "model=moe_tiny", "cluster=dgx_h200", "optim.algorithm=muon"]))
    kinds = {row["kind"] for row in results["rows"]}
    assert {"experts", "routers", "products", "Muon", "norm, clipping and AdamW"} <= kinds
    assert "the planner expects" in capsys.readouterr().out


@pytest.mark.parametrize("settings", [["model=gpt_1b3"], full(["model=llama_1b", "train.loss_chunks=4"])], ids=str)
def test_further_microbatches_add_to_gradients_by_the_products_themselves(settings):
    config = step(*settings, "train.seq_len=1024", "train.micro_batch_size=1")
    counter = count(config, compiled=False)
    assert planned(config, compiled=False) == pytest.approx(counter.seconds.total(), rel=0.01)
    whole = count(replace(config, train=replace(config.train, micro_batch_size=4)), compiled=False)
    assert counter.kernels["products"] == 4 * whole.kernels["products"]
    more = counter.seconds - whole.seconds
    # Weights are converted again; head and loss in parts read the head's weight, and scale its gradient, again.
    del more["conversion of weights"], more["products"], more["loss"]
    assert more.total() < 0.01 * whole.seconds.total()


def test_a_unet_is_rejected():
    with pytest.raises(ConfigError, match="only steps of text models are counted"):
        read_settings(["model=unet_tiny"])

"""Contenders that are compared on one device, or in the update, do the same work."""

import pytest
import torch

from benchmarks.adapters.gpt4d import OVERLAPS, Blocks, Training
from benchmarks.adapters.gpt4d_muon import UpdateTraining
from benchmarks.adapters.torch import TorchTraining
from benchmarks.adapters.torch_gpt import build_torch_gpt
from benchmarks.experiments.one_device import TrainerSettings, trainings
from benchmarks.laboratory.virtual_device import VirtualDevice
from benchmarks.workloads import Workload, initial_weights, sequences
from gpt4d.model.gpt2 import GPT2Config
from gpt4d.parallel.grid import Grid
from tests.support.grids import full

CONFIG = GPT2Config("small", layers=2, hidden=16, heads=4, vocab_size=24, vocab_multiple=8, max_positions=8)
WORK = Workload(CONFIG, batch=4, steps=1)
MUON_WORK = Workload(GPT2Config("small", 2, 32, 4, vocab_size=64, max_positions=16), batch=8, steps=1)


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_our_blocks_use_their_weights_in_the_described_order(overlap):
    work = Workload(GPT2Config("small", 4, 16, 4, vocab_size=8, max_positions=8), batch=2, steps=1)
    contender = Blocks(Grid(), work, *OVERLAPS[overlap])
    for _ in range(2):
        contender.step()  # asserts that every use of a weight is the next one of the order
    assert all(matrix.grad.any() for matrix in contender.blocks.parameters() if matrix.spec.group == "matrices")


def losses(trainer):
    config = TrainerSettings(layers=2, hidden=32, heads=2, vocabulary=128, length=8, batch=2, trainer=trainer)
    training = trainings(config)["eager"]
    return [training.step()()["loss"] for _ in range(3)]


def test_all_trainers_have_the_same_losses():
    ours = losses("ours")
    assert ours[2] < ours[0]
    for trainer in ("torch", "transformers"):
        assert losses(trainer) == pytest.approx(ours, rel=1e-5)


def test_torch_gpt_trains_like_our_model():
    ours = Training("1x1x1x1", WORK)
    theirs = TorchTraining(build_torch_gpt(initial_weights(CONFIG), CONFIG), WORK.share(0, 1))
    for _ in range(3):
        ours.step()
        theirs.step()
        torch.testing.assert_close(ours.loss.float(), theirs.loss)


def busy_s(build) -> float:
    """Return the time for which a virtual device computes a step of a trainer that ``build`` returns."""
    with VirtualDevice(flops=1e12, memory_gb_s=1e6, launch_us=0) as device:
        training = build()
        before = device.stream.busy_s
        training.step()
        return device.stream.busy_s - before


def test_torch_gpt_computes_as_long_as_our_model_on_a_virtual_device():
    config = GPT2Config("small", layers=2, hidden=128, heads=4, vocab_size=256, max_positions=32)
    work = Workload(config, batch=4, steps=1)
    ours = busy_s(lambda: Training("1x1x1x1", work))
    theirs = busy_s(lambda: TorchTraining(build_torch_gpt(initial_weights(config), config), work.share(0, 1)))
    assert theirs == pytest.approx(ours, rel=0.02)


def test_shares_of_the_sequences_form_the_batch():
    batch = sequences(0, 1, CONFIG, batch=4)
    shares = [sequences(share, 4, CONFIG, batch=4) for share in range(4)]
    for part in range(2):
        torch.testing.assert_close(torch.cat([share[part] for share in shares]), batch[part])


def trained(grid, variant):
    """Return, on a rank, its weights after three steps, and the axes on which the update waited."""
    training = UpdateTraining(grid, variant, MUON_WORK)
    for _ in range(3):
        results = training.step()()
    weights = {name: p.detach().clone() for name, p in training.stage.module.named_parameters()}
    return weights, {axis for axis, seconds in results["update_exposed_s"].items() if seconds}


@pytest.mark.parametrize("grid", ["2x1x2x1", full("1x2x1x2"), full("2x1x1x2/sharded")])
def test_the_duplicated_scheme_computes_the_updates_of_muon(ranks, grid):
    results = zip(*(ranks.run(4, trained, grid, variant) for variant in ("muon", "duplicated", "adamw")), strict=True)
    for (muon, waited), (duplicated, gathered), (adamw, _) in results:
        assert "stage" in waited and "x" in gathered and "stage" not in gathered
        for name, weight in muon.items():
            torch.testing.assert_close(duplicated[name], weight, rtol=1e-5, atol=1e-6)
        assert any((adamw[name] - weight).abs().max() > 1e-3 for name, weight in muon.items())

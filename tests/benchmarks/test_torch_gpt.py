import pytest
import torch

from benchmarks.adapters.gpt4d import Training
from benchmarks.adapters.torch import TorchTraining
from benchmarks.adapters.torch_gpt import build_torch_gpt
from benchmarks.laboratory.virtual_device import VirtualDevice
from benchmarks.workloads import Workload, initial_weights, sequences
from gpt4d.model.gpt2.config import GPT2Config

CONFIG = GPT2Config("small", layers=2, hidden=16, heads=4, vocab_size=24, vocab_multiple=8, max_positions=8)
WORK = Workload(CONFIG, batch=4, steps=1)


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

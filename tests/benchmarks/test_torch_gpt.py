import torch

from benchmarks.workers.torch_gpt import build_torch_gpt
from benchmarks.workers.train_ours import Gpt4dTraining
from benchmarks.workers.train_torch import TorchTraining
from benchmarks.workers.training import initial_weights, sequences
from gpt4d.config import GridSizes
from gpt4d.model.gpt2.config import GPT2Config

CONFIG = GPT2Config("small", layers=2, hidden=16, heads=4, vocab_size=24, vocab_multiple=8, max_positions=8)


def test_torch_gpt_trains_like_our_model():
    ours = Gpt4dTraining(GridSizes(), CONFIG, batch=4)
    theirs = TorchTraining(build_torch_gpt(initial_weights(CONFIG), CONFIG), sequences(0, 1, CONFIG, batch=4))
    for _ in range(3):
        ours.step()
        theirs.step()
        torch.testing.assert_close(ours.loss.float(), theirs.loss)


def test_shares_of_the_sequences_form_the_batch():
    batch = sequences(0, 1, CONFIG, batch=4)
    shares = [sequences(share, 4, CONFIG, batch=4) for share in range(4)]
    for part in range(2):
        torch.testing.assert_close(torch.cat([share[part] for share in shares]), batch[part])

import torch
import torch.nn.functional as F

from benchmarks.workers.torch_gpt import adamw, build_torch_gpt
from benchmarks.workers.training import OPTIM, initial_weights, our_model, sequences
from gpt4d.model.gpt2.config import GPT2Config
from gpt4d.optim import build_optimizer
from gpt4d.parallel.grid import Grid
from gpt4d.parallel.weights import WeightStream

CONFIG = GPT2Config("small", layers=2, hidden=16, heads=4, vocab_size=24, vocab_multiple=8, max_positions=8)


def test_torch_gpt_trains_like_our_model():
    ours, theirs = our_model(WeightStream(Grid()), CONFIG), build_torch_gpt(initial_weights(CONFIG), CONFIG)
    optimizers = build_optimizer(ours.named_parameters(), OPTIM), adamw(theirs.parameters())
    ids, targets = sequences(0, 1, CONFIG, batch=4)
    for _ in range(3):
        loss = ours.loss_sum(ids, targets, torch.arange(4)) / targets.numel()
        expected = F.cross_entropy(theirs(ids).flatten(0, 1), targets.flatten())
        torch.testing.assert_close(loss, expected)
        loss.backward()
        expected.backward()
        ours.weights.finish()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def test_shares_of_the_sequences_form_the_batch():
    batch = sequences(0, 1, CONFIG, batch=4)
    shares = [sequences(share, 4, CONFIG, batch=4) for share in range(4)]
    for part in range(2):
        torch.testing.assert_close(torch.cat([share[part] for share in shares]), batch[part])

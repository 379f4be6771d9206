"""A trainer's use of the data settings."""

import itertools
import re

import numpy as np
import pytest
import torch
import torch.distributed as dist

from gpt4d.data.corpus import corpus as prepared
from gpt4d.data.documents import documents, is_held_out
from gpt4d.validation import validate
from tests.support.grids import train_in_rank
from tests.support.rank_pool import RankFailure


def in_rank(config):
    """Return three losses of the first batch, its rows, the tokens of the held-out set, and the sample and the summary.

    The losses: as configured, summed over the documents one by one, and with attention across documents.
    """
    from gpt4d.training.trainer import Trainer

    trainer = Trainer(validate(config, dist.get_world_size()), torch.device("cpu"))
    task, module = trainer.task, trainer.stage.module
    (batch,) = task.batches(0)
    ids, targets, sample_ids = batch.inputs["ids"], batch.targets, batch.sample_ids
    end = prepared(config.data).first.end_of_text
    with torch.no_grad():
        loss, separate = task.compute(module, trainer.stage.parts[0], batch, {})["loss"].item(), 0.0
        for row, following in zip(ids, targets, strict=True):
            starts = [0, *(torch.nonzero(row == end).ravel() + 1).tolist(), len(row)]
            for start, stop in itertools.pairwise(starts):
                if start < stop:
                    document = row[None, start:stop], following[None, start:stop], sample_ids[:1]
                    separate += module.loss_sum(*document).item()
        across = module.loss_sum(ids, targets, sample_ids).item()
    rows, held_out = torch.cat((ids, targets[:, -1:]), 1).tolist(), task.validation["held_out"].source.tokens[:]
    texts = getattr(task.sample(), "message", None), task.summary()
    task.close()
    trainer.checkpoints.close()
    return loss, separate, across, rows, held_out, texts


def test_reset_attention_keeps_attention_inside_a_document(ranks, tiny):
    overrides = ["train.seq_len=32", "train.batch_size=64", "data.validation_fraction=0.3"]
    ((loss, separate, across, *_),) = ranks.run(1, in_rank, tiny(*overrides, "data.reset_attention=true"))
    assert loss == pytest.approx(separate, rel=1e-6) and abs(loss - across) > 1e-5 * across
    ((loss, _, across, *_),) = ranks.run(1, in_rank, tiny(*overrides, "data.reset_attention=false"))
    assert loss == across


def test_validation_uses_held_out_documents_and_training_the_others(ranks, tiny):
    config = tiny("logging.sample_tokens=1")
    ((*_, rows, validated, (sample, summary)),) = ranks.run(1, in_rank, config)
    files = prepared(config.data).first
    trained, held_out = (files.tokens(split)[:] for split in ("train", "validation"))
    windows = [trained[start : start + 17].tolist() for start in range(0, len(trained) - 16, 16)]
    assert all(row in windows for row in rows) and np.array_equal(validated, held_out)
    assert len(trained) > len(held_out) > 0 and "lower it" not in summary
    first = next(d.text for d in documents(config.data) if is_held_out(d.text, config.data.validation_fraction))
    text = sample.strip()
    length = max(length for length in range(len(text) + 1) if first.startswith(text[:length]))
    assert length > 8 and len(text) - length < 16, "the sample has the prompt and one token"


def test_a_tokenizer_smaller_than_the_vocabulary_of_the_model_is_reported(ranks, tiny):
    ((*_, (_, summary)),) = ranks.run(1, in_rank, tiny("model.vocab_size=400", "data.tokenizer_vocab=300"))
    assert re.search(r"the tokenizer has \d+ tokens, and model\.vocab_size=400; lower it", summary)


def test_the_error_for_a_source_shorter_than_a_sequence_names_it(ranks, tiny, tmp_path):
    (tmp_path / "short.txt").write_text("short")
    overrides = [f"data.path={tmp_path / 'short.txt'}", "data.validation_fraction=0", "data.name=short"]
    with pytest.raises(RankFailure, match=r"the training text in .*/short-\w+ has \d; use more"):
        ranks.run(1, train_in_rank, tiny(*overrides))

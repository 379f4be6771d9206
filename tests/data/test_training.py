"""A trainer's use of the data settings."""

import itertools
import re

import numpy as np
import pytest
import torch
import torch.distributed as dist

from gpt4d.data.documents import documents, is_held_out
from gpt4d.validation import validate
from tests.support.grids import train_in_rank
from tests.support.rank_pool import RankFailure


def in_rank(config):
    """Return three losses of the first batch, the tokens of both splits, the tokens that the loaders read, and texts.

    The losses: as configured, summed over the documents one by one, and with attention across documents. The texts: the
    prompt of the sample, and the summary of the data.
    """
    from gpt4d.trainer import Trainer

    trainer = Trainer(validate(config, dist.get_world_size()), torch.device("cpu"))
    task, module = trainer.task, trainer.stage.module
    (batch,) = task.batches(0)
    ids, targets, sample_ids = batch.inputs["ids"], batch.targets, batch.sample_ids
    with torch.no_grad():
        loss, separate = task.compute(module, trainer.stage.parts[0], batch, {})["loss"].item(), 0.0
        for row, following in zip(ids, targets, strict=True):
            starts = [0, *(torch.nonzero(row == task._files.end_of_text).ravel() + 1).tolist(), len(row)]
            for start, stop in itertools.pairwise(starts):
                if start < stop:
                    document = row[None, start:stop], following[None, start:stop], sample_ids[:1]
                    separate += module.loss_sum(*document).item()
        across = module.loss_sum(ids, targets, sample_ids).item()
    tokens = {split: task._files.tokens(split)[:] for split in ("train", "validation")}
    read = task._training.tokens[:], task._sets["held_out"].tokens[:]
    texts = task._held_out_prompt(), task.summary()
    task.close()
    trainer.checkpoints.close()
    return loss, separate, across, tokens, read, texts


def test_reset_attention_keeps_attention_inside_a_document(ranks, tiny):
    overrides = ["train.seq_len=32", "train.batch_size=64", "data.validation_fraction=0.3"]
    ((loss, separate, across, *_),) = ranks.run(1, in_rank, tiny(*overrides, "data.reset_attention=true"))
    assert loss == pytest.approx(separate, rel=1e-6) and abs(loss - across) > 1e-5 * across
    ((loss, _, across, *_),) = ranks.run(1, in_rank, tiny(*overrides, "data.reset_attention=false"))
    assert loss == across


def test_validation_uses_held_out_documents_and_training_the_others(ranks, tiny):
    ((*_, tokens, (trained, validated), (prompt, summary)),) = ranks.run(1, in_rank, config := tiny())
    assert np.array_equal(trained, tokens["train"]) and np.array_equal(validated, tokens["validation"])
    assert len(trained) > len(validated) > 0
    held_out = (d.text for d in documents(config.data) if is_held_out(d.text, config.data.validation_fraction))
    assert "lower it" not in summary
    assert len(prompt) > 8 and next(held_out).startswith(prompt)


def test_a_tokenizer_smaller_than_the_vocabulary_of_the_model_is_reported(ranks, tiny):
    ((*_, (_, summary)),) = ranks.run(1, in_rank, tiny("model.vocab_size=400", "data.tokenizer_vocab=300"))
    assert re.search(r"the tokenizer has \d+ tokens, and model\.vocab_size=400; lower it", summary)


def test_the_error_for_a_source_shorter_than_a_sequence_names_it(ranks, tiny, tmp_path):
    (tmp_path / "short.txt").write_text("short")
    overrides = [f"data.path={tmp_path / 'short.txt'}", "data.validation_fraction=0", "data.name=short"]
    with pytest.raises(RankFailure, match=r"the training text in .*/short-\w+ has \d; use more"):
        ranks.run(1, train_in_rank, tiny(*overrides))

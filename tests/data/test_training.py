"""What a trainer makes of the settings of its data."""

import itertools

import numpy as np
import pytest
import torch
import torch.distributed as dist

from gpt4d.config import validate
from tests.grids import train_in_rank
from tests.rank_pool import RankFailure


def in_rank(config):
    """The loss of the first batch, its tokens, that of its documents one by one, and the tokens of both loaders."""
    from gpt4d.trainer import Trainer

    trainer = Trainer(config, validate(config, dist.get_world_size()), torch.device("cpu"))
    ((ids, targets, numbers),) = trainer.training.step(0)
    with torch.no_grad():
        loss = trainer.model.loss_sum(ids, targets, numbers).item()
        trainer.model.document_end, alone = None, 0.0
        for row, following in zip(ids, targets, strict=True):
            starts = [0, *(torch.nonzero(row == trainer.files.end_of_text).ravel() + 1).tolist(), len(row)]
            for start, stop in itertools.pairwise(starts):
                if start < stop:
                    document = row[None, start:stop], following[None, start:stop], numbers[:1]
                    alone += trainer.model.loss_sum(*document).item()
        whole = trainer.model.loss_sum(ids, targets, numbers).item()
    tokens = {split: trainer.files.tokens(split)[:] for split in ("train", "validation")}
    read = trainer.training.sequences.tokens[:], trainer.validation.sequences.tokens[:]
    trainer.training.close()
    trainer.saver.close()
    return loss, alone, whole, tokens, read


def test_attention_stays_inside_a_document_where_that_is_asked_for(ranks, tiny):
    words = ["train.seq_len=32", "train.batch_size=64", "data.validation_fraction=0.3"]
    ((loss, alone, whole, _, _),) = ranks.run(1, in_rank, tiny(*words, "data.reset_attention=true"))
    assert loss == pytest.approx(alone, rel=1e-6) and abs(loss - whole) > 1e-5 * whole
    ((loss, _, whole, _, _),) = ranks.run(1, in_rank, tiny(*words, "data.reset_attention=false"))
    assert loss == whole


def test_a_trainer_validates_on_what_is_held_out_and_trains_on_the_rest(ranks, tiny):
    ((*_, tokens, (trained, validated)),) = ranks.run(1, in_rank, tiny())
    assert np.array_equal(trained, tokens["train"]) and np.array_equal(validated, tokens["validation"])
    assert len(trained) > len(validated) > 0


def test_a_source_too_short_for_a_sequence_is_named(ranks, tiny, tmp_path):
    (tmp_path / "short.txt").write_text("short")
    words = [f"data.path={tmp_path / 'short.txt'}", "data.validation_fraction=0", "data.name=short"]
    with pytest.raises(RankFailure, match=r"the text to train on in .*/short-\w+ has \d; use more"):
        ranks.run(1, train_in_rank, tiny(*words))

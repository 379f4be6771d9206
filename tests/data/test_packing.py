"""Conversations are packed completely, once each, and their mask and limits stay with them."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpt4d.config import DataConfig
from gpt4d.data import preparation, prepare
from gpt4d.data.sampler import IGNORED, Blend, PackedSequences, pack
from tests.support.chat import conversations, write_lines, write_tokenizer


@settings(deadline=None)
@given(st.lists(st.integers(2, 40), max_size=60), st.integers(2, 30))
def test_packing_has_every_fitting_document_once_and_no_sequence_overflows(lengths, capacity):
    lengths = np.array(lengths, np.int64)
    documents, bounds = pack(lengths, capacity)
    assert sorted(documents.tolist()) == np.flatnonzero(lengths <= capacity).tolist()
    sequences = [documents[a:b] for a, b in itertools.pairwise(bounds.tolist())]
    assert all(0 < lengths[each].sum() <= capacity and each.tolist() == sorted(each) for each in sequences)
    assert [each[0] for each in sequences] == sorted(each[0] for each in sequences)
    totals = sorted(lengths[each].sum() for each in sequences)
    assert len(totals) < 2 or totals[0] + totals[1] > capacity, "two sequences fit into one"


def test_a_document_takes_the_smallest_space_that_it_fits_into():
    documents, bounds = pack(np.array([2, 7, 5, 3, 4]), 10)
    assert [documents[a:b].tolist() for a, b in itertools.pairwise(bounds.tolist())] == [[0], [1, 3], [2, 4]]


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    directory = tmp_path_factory.mktemp("chat")
    path = write_lines(directory / "a.jsonl", [{"messages": messages} for messages in conversations(80)])
    tokenizer = str(write_tokenizer(directory / "tokenizer"))
    return DataConfig("chat", "chat", str(path), tokenizer=tokenizer, tokenizer_vocab=None, processes=1)


@pytest.fixture
def files(config, tmp_path, monkeypatch):
    """Return token files in parts, whose tokens, masks and ends are those of one part (test_chat.py)."""
    monkeypatch.setattr(preparation, "PART_TOKENS", 300)
    return prepare.prepare(config, tmp_path / "out")


def whole_conversations(files, split):
    """Return the tokens and the mask of each conversation."""
    ends = files.document_ends(split).tolist()
    ids, mask = files.tokens(split)[:].tolist(), files.mask(split)[:].tolist()
    return [(ids[start:stop], mask[start:stop]) for start, stop in itertools.pairwise([0, *ends])]


@pytest.mark.parametrize("split", ["train", "validation"])
def test_an_epoch_has_each_conversation_once_with_its_mask_and_its_limits(files, split):
    packed = PackedSequences(files, split, 47, 3, shuffle=True, multiple=4)
    expected = whole_conversations(files, split)
    assert packed.count % 4 == 0 and len(expected) == files.count(split, "documents")
    long = [conversation for conversation in expected if len(conversation[0]) > 48]
    assert [expected[number] for number in packed.long] == long
    found = []
    for sample in range(packed.count):
        ((ids, targets, numbers),) = packed.rows(np.array([sample]))
        assert (np.diff(numbers[numbers >= 0]) >= 0).all() and packed.counts(np.array([sample])) == (
            (targets != IGNORED).sum(),
            (numbers >= 0).sum(),
        )
        assert (ids[numbers < 0] == files.end_of_text).all() and (targets[numbers < 0] == IGNORED).all()
        for number in range(numbers.max() + 1):
            inside = np.flatnonzero(numbers == number)
            own, predicted = ids[inside], targets[inside]
            shown = predicted != IGNORED
            assert (predicted[shown][:-1] == np.append(own[1:], IGNORED)[shown][:-1]).all()
            last = [int(predicted[-1])] if shown[-1] else []  # the last token of the sequence is only predicted
            found.append((own.tolist() + last, [0, *shown[: len(inside) - (not last)].astype(int).tolist()]))
    assert sorted(found) == sorted(each for each in expected if len(each[0]) <= 48)


def test_a_blend_of_conversations_has_the_rows_and_the_losses_of_its_sources(files):
    sources = [PackedSequences(files, "train", length, 0, shuffle=True) for length in (47, 47)]
    blend, ids = Blend(sources, [[3.0, 1.0]]), np.arange(8)
    numbers, own = blend.choose(ids)
    for row, source, source_id in zip(blend.rows(ids), numbers, own, strict=True):
        assert (row == sources[source].rows(np.array([source_id]))).all()
    assert blend.counts(ids).trained == (blend.rows(ids)[:, 1] != IGNORED).sum() > 0
    one = ids[numbers == 0][:1]  # the batch lacks a source
    assert blend.counts(one).trained == (blend.rows(one)[:, 1] != IGNORED).sum() > 0


def test_the_order_of_packed_sequences_depends_on_the_seed_and_the_epoch(files):
    first, other = (PackedSequences(files, "train", 48, seed, shuffle=True) for seed in (0, 1))
    epochs = [first.rows(np.arange(first.count) + epoch * first.count) for epoch in (0, 1)]
    assert not (epochs[0] == epochs[1]).all() and not (epochs[0] == other.rows(np.arange(first.count))).all()
    assert sorted(row.tobytes() for row in epochs[0]) == sorted(row.tobytes() for row in epochs[1])

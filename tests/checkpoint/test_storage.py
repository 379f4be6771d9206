"""Checkpoints hold global tensors: any grid reads what another grid wrote, bit by bit."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpt4d.checkpoint import checkpoint_dir, storage
from gpt4d.checkpoint.checkpoint_dir import Checkpoint
from gpt4d.checkpoint.saving import Saver
from gpt4d.checkpoint.tensor_files import Chunk, StoredTensor, complete_directory
from gpt4d.config import CheckpointConfig, ConfigError, GridSizes
from gpt4d.parallel.grid import Grid
from gpt4d.parallel.layout import Layout, ParameterSpec
from tests.support.checkpoints import DOCUMENTS, MODEL, STATES, build, meta, save_state
from tests.support.grids import build_model, full, global_tensor, grid_name
from tests.support.rank_pool import RankFailure


def expected_tensors():
    """Return the global tensors of ``save_state``, computed on one device without a mesh."""
    parameters = {n: p.detach() for n, p in build_model(MODEL, GridSizes(), torch.float32, seed=7).named_parameters()}
    states = {f"optim.{n}.{k}": p * factor + 1 for n, p in parameters.items() for k, factor in STATES.items()}
    return {f"model.{n}": p for n, p in parameters.items()} | states


def load(sizes, directory, shard):
    """Load a checkpoint into a model with other weights. Returns progress, step counters and global tensors."""
    model, optimizer = build(sizes, shard, seed=8)
    grid = model.context.grid
    checkpoint = Checkpoint(directory)
    storage.load(checkpoint, model, optimizer, grid)
    steps = {int(state["step"]) for state in optimizer.state.values()}
    shards = storage.parts(model, optimizer)
    tensors = {name: global_tensor(shard.local, shard.spec, grid) for name, shard in shards.items()}
    return checkpoint.meta.progress, steps, tensors


# 12 heads and hidden 24 are divisible by axes of up to 4. Each grid pads the vocabulary of 37 as it needs.
GRIDS = st.builds(GridSizes, *[st.sampled_from((1, 2, 3, 4))] * 4).filter(
    lambda g: g.devices <= 8 and 24 % (g.y * g.z) == 0 and 24 % (g.x * g.z) == 0
)


def check_another_grid_reads(ranks, run, writer, writer_shards, reader, reader_shards):
    """Save on one grid, load on another one, and compare all tensors; ``…_shards``: data splits the states."""
    ranks.run(writer.devices, save_state, writer, writer_shards, run)
    (directory,) = checkpoint_dir.committed(run)
    progress, steps, loaded = ranks.run(reader.devices, load, reader, directory, reader_shards)[0]
    assert progress == checkpoint_dir.Progress(3, 30, 300) and steps == {3}
    written = expected_tensors()
    assert loaded.keys() == written.keys()
    for name, tensor in written.items():
        assert torch.equal(loaded[name], tensor), name


def save_with_rounded_rows(sizes, run_dir):
    """Save a model on a rank whose rows are rounded, except the rows that the rank updates."""
    model, optimizer = build(sizes, shard=True)
    exact = [p for _, p in optimizer.shards()]
    values = [p.detach().clone() for p in exact]
    for parameter in model.parameters():
        parameter.data.copy_(parameter.bfloat16())
    for parameter, value in zip(exact, values, strict=True):
        parameter.data.copy_(value)
    saver = Saver(CheckpointConfig(), run_dir, model.context.grid)
    saver.start(meta(3), storage.parts(model, optimizer), DOCUMENTS)
    saver.finished(wait=True)
    saver.close()


def test_a_checkpoint_has_the_rows_of_the_ranks_that_update_them(ranks, tmp_path):
    ranks.run(4, save_with_rounded_rows, GridSizes(2, 1, 1, 2), tmp_path)
    (directory,) = checkpoint_dir.committed(tmp_path)
    files = Checkpoint(directory).files
    for name, tensor in expected_tensors().items():
        assert torch.equal(files.global_tensor(name), tensor), name


def test_a_grid_reads_bit_by_bit_what_another_wrote(ranks, tmp_path):
    check_another_grid_reads(ranks, tmp_path, GridSizes(2, 1, 2, 2), True, GridSizes(1, 3, 1, 2), False)


@pytest.mark.full
def test_any_grid_reads_bit_by_bit_what_another_wrote(ranks, tmp_path):
    runs = iter(range(1000))

    @settings(max_examples=5, deadline=None, derandomize=True, database=None)
    @given(GRIDS, st.booleans(), GRIDS, st.booleans())
    def check(writer, writer_shards, reader, reader_shards):
        run = tmp_path / str(next(runs))
        check_another_grid_reads(ranks, run, writer, writer_shards, reader, reader_shards)

    check()


@pytest.mark.parametrize("writer", [full(GridSizes(2, 2, 2)), GridSizes(1, 1, 1, 4)], ids=grid_name)
def test_files_of_similar_size_hold_each_value_of_each_tensor_once(ranks, tmp_path, writer):
    ranks.run(writer.devices, save_state, writer, False, tmp_path)
    files = Checkpoint.open(tmp_path).files
    expected = expected_tensors()
    assert files.tensors.keys() == expected.keys()
    assert [tensor.problem() for tensor in files.tensors.values() if tensor.problem()] == []
    on_disk = [path.stat().st_size for path in files.directory.glob("rank_*.bin")]
    values = [tensor.nbytes for tensor in files.tensors.values()]
    assert sum(on_disk) == pytest.approx(sum(values), rel=0.1)  # the rest is alignment padding
    assert len(on_disk) == writer.devices and max(on_disk) - min(on_disk) <= max(values)
    for name, tensor in expected.items():
        assert torch.equal(files.global_tensor(name), tensor)


def test_files_with_a_value_twice_or_not_at_all_are_no_checkpoint(tmp_path):
    for starts, problem in (((0, 1), "two chunks overlap"), ((0, 3), "a chunk exceeds"), ((0,), "number of elements")):
        chunks = [Chunk((start,), (2,), "rank_00000.bin", 0) for start in starts]
        written = [({"a": StoredTensor(torch.float32, (4,), [chunk]).to_json()}, {}) for chunk in chunks]
        with pytest.raises(ValueError, match=rf"tensors\.json: a: .*{problem}"):
            complete_directory(tmp_path, written, {})
    assert not [*tmp_path.iterdir()]


def load_as(model, directory):
    other = build_model(model, GridSizes(), torch.float32)
    storage.load(Checkpoint(directory), other, None, other.context.grid)


def test_tensors_of_another_shape_are_rejected_by_name(ranks, tmp_path):
    ranks.run(1, save_state, GridSizes(), False, tmp_path)
    (directory,) = checkpoint_dir.committed(tmp_path)
    with pytest.raises(RankFailure, match=r"of shape \[37, 24\], torch.float32, but this run needs shape \[37, 48\]"):
        ranks.run(1, load_as, replace(MODEL, hidden=48), directory)
    with pytest.raises(RankFailure, match=r"model\.blocks\.1\S* is missing, but this run needs"):
        ranks.run(1, load_as, replace(MODEL, layers=2), directory)
    with pytest.raises(ConfigError, match=r"model\.hidden=48: the checkpoint .* has 24"):
        Checkpoint(directory).check_fits(replace(MODEL, hidden=48))
    Checkpoint(directory).check_fits(replace(MODEL, dropout=0.5))


def unread_tensors(grids, directory):
    """On a rank: the pairs of grids of which the second one reads other values than the first one has written.

    The tensor that they write has extents that no axis divides.
    """
    wrong, full = [], torch.arange(105.0).view(7, 3, 5)
    spec = ParameterSpec(full.shape, Layout(("y", "z"), (), ("x", "data")))
    meshes = {sizes: Grid(sizes) for sizes in grids}
    locals_of = {sizes: full[grid.local_slices(spec.shape, spec.layout)].clone() for sizes, grid in meshes.items()}
    for writer, grid in meshes.items():
        saver = Saver(CheckpointConfig(), directory / str(writer), grid)
        saver.start(meta(3), {"model.w": storage.LocalShard(locals_of[writer], spec)}, {})
        checkpoint = Checkpoint(saver.finished(wait=True).path)
        saver.close()
        for reader, local in locals_of.items():
            loaded = torch.full_like(local, torch.nan)
            storage.fill({"model.w": storage.LocalShard(loaded, spec)}, checkpoint.files, meshes[reader])
            if not torch.equal(loaded, local):
                wrong.append((writer, reader))
    return wrong


def test_uneven_extents_are_split_as_the_layout_says(ranks, tmp_path):
    grids = [GridSizes(2, 2, 1, 2), GridSizes(1, 4, 2, 1)]
    assert ranks.run(8, unread_tensors, grids, tmp_path) == [[]] * 8
    for sizes in grids:
        assert Checkpoint.open(tmp_path / str(sizes)).files.tensors["model.w"].problem() is None


def save_or_load_extra(sizes, run_dir, load_from=None, name="ema.w"):
    """Save the model and a toy tensor, or load them on another grid. Returns whether the loaded values are right."""
    model, optimizer = build(sizes)
    grid = model.context.grid
    spec = ParameterSpec((7, 3, 5), Layout(("y", "z"), (), ("x", "data")))
    local = torch.arange(105.0).view(spec.shape)[grid.local_slices(spec.shape, spec.layout)].clone()
    if load_from is None:
        saver = Saver(CheckpointConfig(), run_dir, grid)
        shards = storage.parts(model, optimizer, {name: (local, spec)})
        saver.start(meta(3), shards, {"notes.txt": b"kept", "tokenizer.json": b"{}"})
        saver.finished(wait=True)
        return saver.close()
    loaded = torch.full_like(local, torch.nan)
    storage.load(Checkpoint(load_from), model, optimizer, grid, {name: (loaded, spec)})
    return torch.equal(loaded, local)


def test_extra_tensors_and_documents_are_saved_and_loaded_on_any_grid(ranks, tmp_path):
    writer, reader = GridSizes(2, 2, 1, 1), GridSizes(1, 1, 2, 2)
    ranks.run(4, save_or_load_extra, writer, tmp_path)
    (directory,) = checkpoint_dir.committed(tmp_path)
    assert Checkpoint(directory).meta.extra == ["ema.w"]
    assert (directory / "notes.txt").read_bytes() == b"kept"
    assert all(ranks.run(4, save_or_load_extra, reader, tmp_path, directory))
    assert ranks.run(1, load, GridSizes(), directory, False)  # The extra tensor is optional for readers.
    with pytest.raises(RankFailure, match=r"extra\.other is missing, but this run needs shape \[7, 3, 5\]"):
        ranks.run(1, save_or_load_extra, GridSizes(), tmp_path, directory, "other")

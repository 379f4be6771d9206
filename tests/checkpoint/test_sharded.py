"""A checkpoint holds global tensors: what one grid wrote, any other reads, bit by bit."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpt4d.checkpoint import checkpoint_dir, sharded, storage
from gpt4d.checkpoint.saving import Saver
from gpt4d.config import CheckpointConfig, ConfigError, GridSizes
from gpt4d.parallel.grid import Grid
from gpt4d.parallel.layout import Layout
from gpt4d.parallel.weights import ParameterSpec
from tests.checkpoint import MODEL, STATES, build, meta, saved_by
from tests.grids import build_model, global_tensor, grid_name
from tests.rank_pool import RankFailure


def what_was_written():
    """Written out on one device, without a mesh: the global tensors of ``saved_by``."""
    parameters = {n: p.detach() for n, p in build_model(MODEL, GridSizes(), torch.float32, seed=7).named_parameters()}
    states = {f"optim.{n}.{k}": p * factor + 1 for n, p in parameters.items() for k, factor in STATES.items()}
    return {f"model.{n}": p for n, p in parameters.items()} | states


def read(sizes, directory, shard):
    """On a rank: what a model of other weights becomes when it is filled from a checkpoint."""
    model, optimizer = build(sizes, shard, seed=8)
    grid = model.weights.grid
    progress = sharded.load(directory, model, optimizer, grid)
    steps = {int(state["step"]) for state in optimizer.state.values()}
    parts = sharded.parts(model, optimizer)
    return progress, steps, {name: global_tensor(part.local, part.spec, grid) for name, part in parts.items()}


# 12 heads, hidden 24, a padded vocabulary of 48: what the axes up to 4 can divide. Other extents are uneven.
GRIDS = st.builds(GridSizes, *[st.sampled_from((1, 2, 3, 4))] * 4).filter(
    lambda g: g.devices <= 8 and 24 % (g.y * g.z) == 0 and 24 % (g.x * g.z) == 0 and 48 % (g.x * g.z) == 0
)


def test_what_one_grid_writes_any_other_reads_bit_by_bit(ranks, tmp_path):
    written = what_was_written()
    runs = iter(range(1000))

    @settings(max_examples=5, deadline=None, derandomize=True, database=None)
    @given(GRIDS, st.booleans(), GRIDS, st.booleans())
    def check(writer, writer_shards, reader, reader_shards):
        run = tmp_path / str(next(runs))
        ranks.run(writer.devices, saved_by, writer, writer_shards, run)
        (directory,) = checkpoint_dir.committed(run)
        progress, steps, found = ranks.run(reader.devices, read, reader, directory, reader_shards)[0]
        assert progress == checkpoint_dir.Progress(3, 30, 300) and steps == {3}
        assert found.keys() == written.keys()
        for name, tensor in written.items():
            assert torch.equal(found[name], tensor), name

    check()


@pytest.mark.parametrize("writer", [GridSizes(2, 2, 2), GridSizes(1, 1, 1, 4)], ids=grid_name)
def test_on_disk_there_are_the_parameters_each_value_once_and_nothing_of_ranks(ranks, tmp_path, writer):
    ranks.run(writer.devices, saved_by, writer, False, tmp_path)
    files = storage.Files(checkpoint_dir.committed(tmp_path)[0])
    parameters = {n for n, _ in build_model(MODEL, GridSizes()).named_parameters()}
    expected = {f"model.{n}" for n in parameters}
    expected |= {f"optim.{n}.{k}" for n in parameters for k in STATES}
    assert files.tensors.keys() == expected
    assert [tensor.problem() for tensor in files.tensors.values() if tensor.problem()] == []
    on_disk = sum(path.stat().st_size for path in files.directory.glob("rank_*.bin"))
    values = sum(tensor.nbytes for tensor in files.tensors.values())
    assert on_disk == pytest.approx(values, rel=0.1)  # what is more fills up to aligned starts
    for name, tensor in what_was_written().items():
        assert torch.equal(files.whole(name), tensor)


def load_as(model, directory):
    other = build_model(model, GridSizes(), torch.float32)
    sharded.load(directory, other, None, other.weights.grid)


def test_tensors_of_another_shape_are_refused_by_name(ranks, tmp_path):
    ranks.run(1, saved_by, GridSizes(), False, tmp_path)
    (directory,) = checkpoint_dir.committed(tmp_path)
    with pytest.raises(RankFailure, match=r"which has one of shape \[48, 24\], torch.float32 where"):
        ranks.run(1, load_as, replace(MODEL, hidden=48), directory)
    with pytest.raises(RankFailure, match=r"has none of that name where this has model\.blocks\.1"):
        ranks.run(1, load_as, replace(MODEL, layers=2), directory)
    with pytest.raises(ConfigError, match=r"model\.hidden=48: the checkpoint .* has 24"):
        checkpoint_dir.check_fits(directory, replace(MODEL, hidden=48))
    checkpoint_dir.check_fits(directory, replace(MODEL, dropout=0.5))


def uneven(sizes, run_dir, read_by=None):
    """On a rank: writes, or reads with another grid, a tensor whose extents no axis divides."""
    grid = Grid(sizes)
    layout = Layout(("y", "z"), (), ("x", "data"))
    spec = ParameterSpec((7, 3, 5), layout)
    whole = torch.arange(105.0).view(spec.shape)
    local = whole[grid.local_slices(spec.shape, layout)].clone()
    if read_by is None:
        saver = Saver(CheckpointConfig(), run_dir, grid)
        saver.start(meta(3), {"model.w": sharded.Part(local, spec)}, b"{}")
        saver.finished(wait=True)
        return saver.close()
    found = torch.full_like(local, torch.nan)
    sharded.fill({"model.w": sharded.Part(found, spec)}, storage.Files(run_dir), grid)
    return torch.equal(found, local)


def test_extents_that_no_axis_divides_are_cut_as_the_layout_says(ranks, tmp_path):
    grids = [GridSizes(2, 2, 1, 2), GridSizes(1, 4, 2, 1)]
    for number, writer in enumerate(grids):
        ranks.run(writer.devices, uneven, writer, tmp_path / str(number))
        (directory,) = checkpoint_dir.committed(tmp_path / str(number))
        assert storage.Files(directory).tensors["model.w"].problem() is None
        for reader in grids:
            assert all(ranks.run(reader.devices, uneven, reader, directory, True))

"""The file format of tensors, and the writer and planner with which torch.distributed.checkpoint produces it.

Each rank writes one file of raw values, ``rank_00003.bin``. The index ``tensors.json`` lists for each global tensor its
dtype, shape and chunks, each with its file and byte offset. The index contains no ranks or grids, so a rank of any grid
reads the region it needs without further planning. There are no pickles.
"""

import itertools
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, cast

import numpy as np
import torch
from torch.distributed.checkpoint import default_planner, storage
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint import planner as planning
from torch.futures import Future

from gpt4d import activity
from gpt4d.checkpoint import manifest
from gpt4d.checkpoint.manifest import Damaged
from gpt4d.files import FileEntry, NewFile, counts, write_file

TENSORS = "tensors.json"
_ALIGNMENT = 64  # bytes, so that any dtype can be read in place
Region = tuple[tuple[int, int], ...]  # (start, stop) along each dim of a global tensor
_DTYPES = {str(d).removeprefix("torch."): d for d in (torch.float64, torch.float32, torch.bfloat16, torch.float16)}


class Chunk(NamedTuple):
    """A region of a global tensor, and the file and offset of its values."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int  # byte offset


@dataclass
class StoredTensor:
    """A global tensor on disk."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: list[Chunk]

    def to_json(self) -> dict:
        return {"dtype": str(self.dtype).removeprefix("torch."), "shape": self.shape, "chunks": self.chunks}

    @classmethod
    def from_json(cls, values: dict) -> "StoredTensor":
        shape, chunks = counts(values["shape"]), []
        for offsets, sizes, file, start in values["chunks"]:
            chunk = Chunk(counts(offsets), counts(sizes), file, *counts([start]))
            if not (len(chunk.offsets) == len(chunk.sizes) == len(shape) and isinstance(file, str)):
                raise ValueError(f"{chunk} does not match a tensor of shape {shape}")
            chunks.append(chunk)
        return cls(_DTYPES[values["dtype"]], shape, chunks)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def problem(self) -> str | None:
        """Return why the chunks do not cover the tensor exactly once, or None if they do."""
        if sum(math.prod(chunk.sizes) for chunk in self.chunks) != math.prod(self.shape):
            return "the chunks and the tensor differ in their number of elements"
        if not all(math.prod(chunk.sizes) for chunk in self.chunks):
            return "a chunk is empty"
        starts = np.array([chunk.offsets for chunk in self.chunks])
        stops = starts + np.array([chunk.sizes for chunk in self.chunks])
        if (stops > np.array(self.shape)).any():
            return "a chunk exceeds the tensor's shape"
        return "two chunks overlap" if len(self.chunks) > 1 and _overlap(starts, stops) else None


def _overlap(starts: np.ndarray, stops: np.ndarray) -> bool:
    """Return whether two of several boxes, which begin at and end before [n, dims], have a common element."""
    dim = max(range(starts.shape[1]), key=lambda dim: len(np.unique(starts[:, dim])))  # leaves the fewest pairs
    order = starts[:, dim].argsort()
    starts, stops = starts[order], stops[order]
    ends = np.searchsorted(starts[:, dim], stops[:, dim])  # boxes from here on begin after the box's end
    for box in np.flatnonzero(ends > np.arange(len(ends)) + 1).tolist():
        later = slice(box + 1, ends[box])
        if ((starts[box] < stops[later]) & (starts[later] < stops[box])).all(-1).any():
            return True
    return False


class Files:
    """The tensors of a checkpoint directory, memory-mapped: only what is accessed is loaded.

    Methods raise Damaged, naming the file, if a file does not match ``tensors.json``.
    """

    def __init__(self, directory: Path):
        self.directory = directory
        self._mapped: dict[str, torch.Tensor] = {}
        self.tensors = manifest.parse_json(
            directory / TENSORS, lambda values: {name: StoredTensor.from_json(t) for name, t in values.items()}
        )

    def check(self, name: str, entries: Mapping[str, FileEntry]) -> None:
        """Raise Damaged unless the tensor's chunks lie in files of the manifest and cover it exactly once."""
        tensor = self.tensors[name]
        problem = tensor.problem()
        for chunk in tensor.chunks:
            if chunk.file not in entries:
                problem = f"{chunk.file!r} is not listed in the manifest"
            else:
                self.chunk_values(tensor, chunk)
        if problem:
            raise Damaged(f"{self.directory / TENSORS}: {name}: {problem}")

    def chunk_values(self, tensor: StoredTensor, chunk: Chunk) -> torch.Tensor:
        """Return a chunk as a read-only view of its file."""
        end = chunk.start + math.prod(chunk.sizes) * tensor.dtype.itemsize
        values = self._bytes(chunk.file)[chunk.start : end]
        if chunk.start % tensor.dtype.itemsize or len(values) != end - chunk.start:
            raise Damaged(f"{self.directory / TENSORS}: a chunk lies outside {chunk.file}")
        return values.view(tensor.dtype).view(chunk.sizes)

    def global_tensor(self, name: str) -> torch.Tensor:
        """Return a global tensor, loaded into memory."""
        tensor = self.tensors[name]
        result = torch.empty(tensor.shape, dtype=tensor.dtype)
        self.read(name, tuple((0, extent) for extent in tensor.shape), result)
        return result

    def read(self, name: str, region: Region, into: torch.Tensor) -> None:
        """Fill ``into`` with a region of a global tensor, from all chunks that overlap the region."""
        tensor, elements_read = self.tensors[name], 0
        for chunk in tensor.chunks:
            ends = zip(region, chunk.offsets, chunk.sizes, strict=True)
            common = [(max(start, o), min(stop, o + size)) for (start, stop), o, size in ends]
            if all(start < stop for start, stop in common):
                source = tuple(slice(a - o, b - o) for (a, b), o in zip(common, chunk.offsets, strict=True))
                target = tuple(slice(a - start, b - start) for (a, b), (start, _) in zip(common, region, strict=True))
                into[target] = self.chunk_values(tensor, chunk)[source]
                activity.progress()
                elements_read += math.prod(b - a for a, b in common)
        if elements_read != into.numel():
            raise Damaged(f"{self.directory / TENSORS}: the chunks of {name} do not cover it")

    def _bytes(self, name: str) -> torch.Tensor:
        if name not in self._mapped:
            path = self.directory / name
            if path.parent != self.directory:
                raise Damaged(f"{self.directory / TENSORS}: {name!r} is not a file name in this directory")
            with manifest.open_regular(path) as file:
                size = os.fstat(file.fileno()).st_size
            self._mapped[name] = torch.from_file(str(path), size=size, dtype=torch.uint8)
        return self._mapped[name]


def write_values(path: Path, tensors: Iterable[torch.Tensor]) -> tuple[FileEntry, list[int]]:
    """Write the tensors' values to a new file. Returns its manifest entry and the byte offset of each tensor."""
    starts = []
    with NewFile(path) as file:
        for tensor in tensors:
            file.write(bytes(-file.size % _ALIGNMENT))
            starts.append(file.size)
            values = tensor.detach().cpu().contiguous().view(-1)
            file.write(values.view(torch.uint8).numpy().data)
    return file.entry, starts


def complete_directory(
    directory: Path, tensors: Mapping[str, StoredTensor], documents: Mapping[str, bytes], entries: dict[str, FileEntry]
) -> None:
    """Add the index of ``tensors``, the ``documents`` and the manifest to a directory with the files of ``entries``."""
    index = json.dumps({name: tensor.to_json() for name, tensor in tensors.items()}).encode()
    for name, content in {**documents, TENSORS: index}.items():
        entries[name] = write_file(directory / name, content)
    manifest.write(directory, entries)


class _Item(planning.WriteItem):
    """A region to write. Torch balances ranks by its size instead of the whole tensor's."""

    def tensor_storage_size(self) -> int:
        assert self.tensor_data is not None
        return math.prod(self.tensor_data.chunk.sizes) * self.tensor_data.properties.dtype.itemsize


class SavePlanner(default_planner.DefaultSavePlanner):
    """Plans a save of sharded tensors: replicas are written by one rank, and all ranks write about as much."""

    def __init__(
        self,
        shards: Mapping[str, tuple[torch.Tensor, tuple[int, ...], Region]],
        wait: Callable[[], None] = lambda: None,
    ):
        """Takes this rank's values (valid after ``wait``), the global shape and the values' region, by tensor name."""
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.shards, self.wait = shards, wait

    def create_local_plan(self) -> planning.SavePlan:
        self.wait()
        items: list[planning.WriteItem] = []
        for name, (local, shape, region) in self.shards.items():
            if local.numel():
                offsets = torch.Size(start for start, _ in region)
                chunk = dcp.ChunkStorageMetadata(offsets, torch.Size(stop - start for start, stop in region))
                data = planning.TensorWriteData(chunk, dcp.TensorProperties(local.dtype), torch.Size(shape))
                kind = planning.WriteItemType.SHARD
                items.append(_Item(dcp.MetadataIndex(name, offsets), kind, tensor_data=data))
        self.plan = planning.SavePlan(items)
        return self.plan

    def create_global_plan(self, all_plans: list[planning.SavePlan]) -> tuple[list[planning.SavePlan], dcp.Metadata]:
        activity.set_waiting(False)
        return super().create_global_plan(all_plans)

    def finish_plan(self, new_plan: planning.SavePlan) -> planning.SavePlan:
        activity.set_waiting(False)
        return super().finish_plan(new_plan)

    def lookup_object(self, index: dcp.MetadataIndex) -> torch.Tensor:
        return self.shards[index.fqn][0]


class Writer(storage.StorageWriter):
    """Writes tensors and ``documents`` (contents by file name) into a new ``directory``.

    Rank 0 calls ``done`` when everything is on disk. A failure on any rank is raised on all. Torch communicates
    between the calls of these methods and the planner's: the watchdog learns when this rank works and when it waits.
    """

    def __init__(self, directory: Path, documents: Mapping[str, bytes], done: Callable[[], None] = lambda: None):
        self.directory, self.documents, self.done = directory, documents, done

    def reset(self, checkpoint_id=None) -> None: ...

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id) -> bool:
        return False  # torch must not choose this writer by itself

    def set_up_storage_writer(self, is_coordinator: bool, *_, **__) -> None:
        if is_coordinator:
            self.directory.mkdir()

    def prepare_local_plan(self, plan: planning.SavePlan) -> planning.SavePlan:
        activity.set_waiting(True)
        return plan

    def prepare_global_plan(self, plans: list[planning.SavePlan]) -> list[planning.SavePlan]:
        activity.set_waiting(True)
        return [replace(plan, storage_data=f"rank_{rank:05}.bin") for rank, plan in enumerate(plans)]

    def write_data(self, plan: planning.SavePlan, planner: planning.SavePlanner) -> Future[list[storage.WriteResult]]:
        future: Future[list[storage.WriteResult]] = Future()
        items = cast(list[_Item], plan.items)
        results: list[storage.WriteResult] = []
        if items:
            tensors = (cast(torch.Tensor, planner.resolve_data(item)) for item in items)
            entry, starts = write_values(self.directory / plan.storage_data, tensors)
            results = [
                storage.WriteResult(item.index, item.tensor_storage_size(), (plan.storage_data, entry, start))
                for item, start in zip(items, starts, strict=True)
            ]
        future.set_result(results)
        activity.set_waiting(True)
        return future

    def finish(self, metadata: dcp.Metadata, results: list[list[storage.WriteResult]]) -> None:
        activity.set_waiting(False)
        saved = cast(dict[str, dcp.TensorStorageMetadata], metadata.state_dict_metadata)
        tensors = {name: StoredTensor(t.properties.dtype, tuple(t.size), []) for name, t in saved.items()}
        entries: dict[str, FileEntry] = {}
        sizes = {(name, tuple(c.offsets)): tuple(c.sizes) for name, tensor in saved.items() for c in tensor.chunks}
        for result in itertools.chain.from_iterable(results):
            file, entries[file], start = result.storage_data
            name, offsets = result.index.fqn, tuple(result.index.offset or ())
            tensors[name].chunks.append(Chunk(offsets, sizes[name, offsets], file, start))
        complete_directory(self.directory, tensors, self.documents, entries)
        self.done()
        activity.set_waiting(True)

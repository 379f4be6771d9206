"""How tensors lie on the disk, and a storage and a planner by which torch.distributed.checkpoint writes them so.

Each rank writes one file, ``rank_00003.bin``, of raw values. ``tensors.json`` says what is where: for each global
tensor its dtype, its shape and the chunks it is cut into, wherever those came from. Nothing in it knows of ranks or
grids, so any other grid reads what it needs, without a plan: a rank knows its tile, the index knows the rest. There are
no pickles.
"""

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch.distributed.checkpoint import default_planner, storage
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint import planner as planning
from torch.futures import Future

from gpt4d.checkpoint import manifest
from gpt4d.checkpoint.manifest import Damaged
from gpt4d.files import FileEntry, NewFile, counts, write_file

TENSORS = "tensors.json"
_ALIGNMENT = 64  # bytes: any dtype can be read in place
Tile = tuple[tuple[int, int], ...]  # the (start, stop) along each dim of a part of a global tensor
_DTYPES = {str(d).removeprefix("torch."): d for d in (torch.float64, torch.float32, torch.bfloat16, torch.float16)}


class Chunk(NamedTuple):
    """A part of a global tensor and where its values are."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int  # bytes


@dataclass
class StoredTensor:
    """A global tensor on the disk."""

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
                raise ValueError(f"{chunk} is no part of a tensor of shape {shape}")
            chunks.append(chunk)
        return cls(_DTYPES[values["dtype"]], shape, chunks)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def problem(self) -> str | None:
        """Why the chunks are not the whole tensor, each part of it once; None if they are."""
        if sum(math.prod(chunk.sizes) for chunk in self.chunks) != math.prod(self.shape):
            return "its chunks have not as many elements as it has"
        starts = torch.tensor([chunk.offsets for chunk in self.chunks])
        stops = starts + torch.tensor([chunk.sizes for chunk in self.chunks])
        if (stops > torch.tensor(self.shape)).any():
            return "a chunk reaches out of it"
        overlaps = ((starts[:, None] < stops) & (starts < stops[:, None])).all(-1)
        return "two of its chunks overlap" if int(overlaps.sum()) > len(self.chunks) else None


class Files:
    """The tensors of a checkpoint directory, read in place: nothing is in memory but what is looked at.

    Damaged, naming the file, where a file is not as ``tensors.json`` says.
    """

    def __init__(self, directory: Path):
        self.directory = directory
        self._mapped: dict[str, torch.Tensor] = {}
        self.tensors = manifest.parsed(
            directory / TENSORS, lambda values: {name: StoredTensor.from_json(t) for name, t in values.items()}
        )

    def check(self, name: str, entries: Mapping[str, FileEntry]) -> None:
        """Damaged unless a tensor's chunks are in files of the manifest and are all of it, each part once."""
        tensor = self.tensors[name]
        problem = tensor.problem()
        for chunk in tensor.chunks:
            if chunk.file not in entries:
                problem = f"{chunk.file!r} is not a file of the manifest"
            else:
                self.values(tensor, chunk)
        if problem:
            raise Damaged(f"{self.directory / TENSORS}: {name}: {problem}")

    def values(self, tensor: StoredTensor, chunk: Chunk) -> torch.Tensor:
        """The values of a chunk, in the file: to be read, not written."""
        end = chunk.start + math.prod(chunk.sizes) * tensor.dtype.itemsize
        values = self._bytes(chunk.file)[chunk.start : end]
        if chunk.start % tensor.dtype.itemsize or len(values) != end - chunk.start:
            raise Damaged(f"{self.directory / TENSORS}: a chunk is not in {chunk.file}, where it says")
        return values.view(tensor.dtype).view(chunk.sizes)

    def whole(self, name: str) -> torch.Tensor:
        """A global tensor, in memory."""
        tensor = self.tensors[name]
        result = torch.empty(tensor.shape, dtype=tensor.dtype)
        self.read(name, tuple((0, extent) for extent in tensor.shape), result)
        return result

    def read(self, name: str, tile: Tile, into: torch.Tensor) -> None:
        """Fills ``into`` with the ``tile`` of a global tensor, from whatever chunks have some of it."""
        tensor, read = self.tensors[name], 0
        for chunk in tensor.chunks:
            ends = zip(tile, chunk.offsets, chunk.sizes, strict=True)
            common = [(max(start, o), min(stop, o + size)) for (start, stop), o, size in ends]
            if all(start < stop for start, stop in common):
                source = tuple(slice(a - o, b - o) for (a, b), o in zip(common, chunk.offsets, strict=True))
                target = tuple(slice(a - start, b - start) for (a, b), (start, _) in zip(common, tile, strict=True))
                into[target] = self.values(tensor, chunk)[source]
                read += math.prod(b - a for a, b in common)
        if read != into.numel():
            raise Damaged(f"{self.directory / TENSORS}: the chunks of {name} are not the whole of it")

    def _bytes(self, name: str) -> torch.Tensor:
        if name not in self._mapped:
            path = self.directory / name
            if path.parent != self.directory:
                raise Damaged(f"{self.directory / TENSORS}: {name!r} is not a file of this directory")
            with manifest.open_regular(path) as file:
                size = os.fstat(file.fileno()).st_size
            self._mapped[name] = torch.from_file(str(path), size=size, dtype=torch.uint8)
        return self._mapped[name]


def write_values(path: Path, tensors: Iterable[torch.Tensor]) -> tuple[FileEntry, list[int]]:
    """A new file of the tensors' values; its entry, and where in it each tensor starts."""
    starts = []
    with NewFile(path) as file:
        for tensor in tensors:
            file.write(bytes(-file.size % _ALIGNMENT))
            starts.append(file.size)
            values = tensor.detach().cpu().contiguous().view(-1)
            file.write(values.view(torch.uint8).numpy().data)
    return file.entry, starts


def describe(
    directory: Path, tensors: Mapping[str, StoredTensor], documents: Mapping[str, bytes], entries: dict[str, FileEntry]
) -> None:
    """Completes a directory that has the files of ``entries``: what is where in them, other documents, the manifest."""
    index = json.dumps({name: tensor.to_json() for name, tensor in tensors.items()}).encode()
    for name, content in {**documents, TENSORS: index}.items():
        entries[name] = write_file(directory / name, content)
    manifest.write(directory, entries)


class _Item(planning.WriteItem):
    """A tile to write. What counts when the writing is dealt out is its size, not that of the whole tensor."""

    def tensor_storage_size(self) -> int:
        return math.prod(self.tensor_data.chunk.sizes) * self.tensor_data.properties.dtype.itemsize


class Planner(default_planner.DefaultSavePlanner):
    """Plans a save of parts of global tensors: what several ranks have, one of them writes, all about as much."""

    def __init__(
        self,
        parts: Mapping[str, tuple[torch.Tensor, tuple[int, ...], Tile]],
        wait: Callable[[], None] = lambda: None,
    ):
        """``parts`` by name: this rank's values, there after ``wait``, the global shape, and which tile they are."""
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.parts, self.wait = parts, wait

    def create_local_plan(self) -> planning.SavePlan:
        self.wait()
        items = []
        for name, (local, shape, tile) in self.parts.items():
            if local.numel():
                offsets = torch.Size(start for start, _ in tile)
                chunk = dcp.ChunkStorageMetadata(offsets, torch.Size(stop - start for start, stop in tile))
                data = planning.TensorWriteData(chunk, dcp.TensorProperties(local.dtype), torch.Size(shape))
                kind = planning.WriteItemType.SHARD
                items.append(_Item(dcp.MetadataIndex(name, offsets), kind, tensor_data=data))
        self.plan = planning.SavePlan(items)
        return self.plan

    def lookup_object(self, index: dcp.MetadataIndex) -> torch.Tensor:
        return self.parts[index.fqn][0]


class Writer(storage.StorageWriter):
    """Writes a checkpoint into a new ``directory``: tensors and, beside them, ``documents``.

    ``done`` is called on the first rank when all of it is on the disk. If anything fails on any rank, it fails on all.
    """

    def __init__(self, directory: Path, documents: Mapping[str, bytes], done: Callable[[], None] = lambda: None):
        self.directory, self.documents, self.done = directory, documents, done

    def reset(self, checkpoint_id=None) -> None: ...

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id) -> bool:
        return False  # never chosen by torch itself

    def set_up_storage_writer(self, is_coordinator: bool, *_, **__) -> None:
        if is_coordinator:
            self.directory.mkdir()

    def prepare_local_plan(self, plan: planning.SavePlan) -> planning.SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[planning.SavePlan]) -> list[planning.SavePlan]:
        return [replace(plan, storage_data=f"rank_{rank:05}.bin") for rank, plan in enumerate(plans)]

    def write_data(self, plan: planning.SavePlan, planner: planning.SavePlanner) -> Future[list[storage.WriteResult]]:
        told = Future()
        if not plan.items:
            told.set_result([])
            return told
        entry, starts = write_values(self.directory / plan.storage_data, map(planner.resolve_data, plan.items))
        told.set_result(
            [
                storage.WriteResult(item.index, item.tensor_storage_size(), (plan.storage_data, entry, start))
                for item, start in zip(plan.items, starts, strict=True)
            ]
        )
        return told

    def finish(self, metadata: dcp.Metadata, results: list[list[storage.WriteResult]]) -> None:
        tensors, entries = {}, {}
        for name, described in metadata.state_dict_metadata.items():
            tensors[name] = StoredTensor(described.properties.dtype, tuple(described.size), [])
        sizes = {
            (name, tuple(chunk.offsets)): tuple(chunk.sizes)
            for name, described in metadata.state_dict_metadata.items()
            for chunk in described.chunks
        }
        for result in (result for of_rank in results for result in of_rank):
            file, entries[file], start = result.storage_data
            name, offsets = result.index.fqn, tuple(result.index.offset)
            tensors[name].chunks.append(Chunk(offsets, sizes[name, offsets], file, start))
        describe(self.directory, tensors, self.documents, entries)
        self.done()

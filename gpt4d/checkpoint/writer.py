"""The writer of a checkpoint's tensors, and the planner with which torch.distributed.checkpoint saves through it."""

import itertools
import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import cast

import torch
from torch.distributed.checkpoint import default_planner, storage
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint import planner as planning
from torch.futures import Future

from gpt4d.checkpoint import checkpoint_dir
from gpt4d.checkpoint.storage import TENSORS, Chunk, Region, StoredTensor
from gpt4d.runtime import activity
from gpt4d.runtime.files import FileEntry, NewFile, write_file

_ALIGNMENT = 64  # bytes, so that any dtype can be read in place


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
    checkpoint_dir.write_manifest(directory, entries)


class _Item(planning.WriteItem):
    """A region to write. Torch balances ranks by the size of the region, not of the full tensor."""

    def tensor_storage_size(self) -> int:
        assert self.tensor_data is not None
        return math.prod(self.tensor_data.chunk.sizes) * self.tensor_data.properties.dtype.itemsize


class SavePlanner(default_planner.DefaultSavePlanner):
    """Plans a save of sharded tensors: one rank writes each replicated shard, and ranks write similar amounts."""

    def __init__(
        self,
        shards: Mapping[str, tuple[torch.Tensor, tuple[int, ...], Region]],
        wait: Callable[[], None] = lambda: None,
    ):
        """Create a planner. ``shards``: values (valid after ``wait``), global shape and region, by tensor name."""
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
    between the calls of these methods and the planner's, so the methods report work and waits to the watchdog.
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

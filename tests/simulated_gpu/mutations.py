"""Faults in one line of gpt4d that a GPU reveals, and that the simulated GPU must find.

    python -m tests.simulated_gpu.mutations [NUMBER…]

Without numbers all faults run sequentially, in temporary copies of the repository. The output names the test that finds
each fault, and the first problem that the simulated GPU reports. The exit code is the number of faults that are not
found.
"""

import sys

from tests.mutations import Mutation, run

_RUNS = "tests/simulated_gpu/test_runs.py"
_STEPS = "tests/simulated_gpu/test_steps.py"
# Some of the steps, to save time.
_ONE_DEVICE = f"{_STEPS} -k device"
_GRIDS = f"{_STEPS} -k 4d"
_STAGES = f"{_STEPS} -k gpipe"
_TIED = f"{_STEPS} -k eager"  # stages that have copies of a weight
_IMAGES = f"{_STEPS} -k unet"

MUTATIONS = [
    # A stream does not wait for the producer of a tensor.
    Mutation(
        "parallel/resharding/transfer.py",
        "link.stream.wait_event(self.started)",
        "pass",
        "a link sends a tensor after it is computed",
        _STAGES,
    ),
    Mutation(
        "parallel/resharding/transfer.py",
        "torch.cuda.current_stream(link.device).wait_event(self.stopped)",
        "pass",
        "a stage computes with a tensor after it has arrived",
        _STAGES,
    ),
    Mutation(
        "parallel/resharding/transfer.py",
        "            self.stopped = now(link.device)",
        "            self.stopped = self.started",
        "the end of a transfer is recorded after its messages",
        _STAGES,
    ),
    Mutation(
        "parallel/sharded_weights.py",
        "return pending.wait()",
        "return pending.result",
        "a layer computes with a weight after it is gathered",
        _GRIDS,
    ),
    Mutation(
        "parallel/comm/stats.py",
        "                    self.work.wait()",
        "                    pass",
        "the computation waits for a collective that overlaps with it",
        _GRIDS,
    ),
    Mutation(
        "parallel/comm/stats.py",
        "self.work.wait()\n                self._record_wait()",
        "self._record_wait()",
        "the computation waits for a collective that does not overlap with it",
        _GRIDS,
    ),
    Mutation(
        "parallel/gradient_reducer.py",
        "return pending.wait()",
        "return pending.result",
        "gradients are unpacked after they are reduced",
        _GRIDS,
    ),
    Mutation(
        "checkpoint/saving.py",
        "self._stream.wait_stream(torch.cuda.current_stream())",
        "pass",
        "a checkpoint is copied after the update",
        _ONE_DEVICE,
    ),
    # An operation changes memory that another stream still reads.
    Mutation(
        "checkpoint/saving.py",
        "torch.cuda.current_stream().wait_event(self._pending.copied)",
        "pass",
        "the next update waits for the copy of a checkpoint",
        _ONE_DEVICE,
    ),
    Mutation(
        "parallel/pipeline/runtime.py",
        "exchange.wait_for_owned()",
        "pass",
        "an update waits until the weights of the previous update are sent to their copies",
        _TIED,
    ),
    Mutation(
        "parallel/pipeline/runtime.py",
        "            self.exchange.wait_for_held()",
        "            pass",
        "a forward waits for copies of another stage's weights",
        _TIED,
    ),
    Mutation(
        "task/averages.py",
        "copies = set(self.stage.copies)\n        self.stage.wait_for_copies()",
        "copies = set(self.stage.copies)",
        "averages replace weights after these are sent to their copies",
        _TIED,
    ),
    # Memory is freed early.
    Mutation(
        "parallel/resharding/transfer.py",
        "local.record_stream(link.stream)",
        "pass",
        "the memory of a sent tensor is not reused before it is sent",
        _STAGES,
    ),
    Mutation(
        "parallel/comm/pending.py",
        "self.source = source",
        "self.source = None",
        "the memory of a collective's input is not reused before the collective has ended",
        _GRIDS,
    ),
    # A wrong stream.
    Mutation(
        "parallel/comm/stats.py",
        "with torch.cuda.stream(self._watching):",
        "with nullcontext():",
        "the computation continues while a collective runs",
        _GRIDS,
    ),
    Mutation(
        "parallel/resharding/transfer.py",
        "        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)",
        "        return nullcontext()",
        "the computation continues while a link sends",
        _STAGES,
    ),
    # The host waits for the GPU.
    Mutation(
        "step.py",
        "stopping = torch.full((), float(stop), dtype=torch.float64, device=device)",
        "stopping = torch.tensor(float(stop), dtype=torch.float64, device=device)",
        "a step copies no number to the GPU",
        _ONE_DEVICE,
    ),
    Mutation(
        "parallel/pipeline/runtime.py",
        "self.total += loss.detach()",
        "self.total += loss.item()",
        "the host does not read the loss of a microbatch",
        _ONE_DEVICE,
    ),
    Mutation(
        "optim/optimizer.py",
        "divisor = (norm / limit).clamp(min=1)",
        "divisor = torch.full_like(norm, norm.item() / limit).clamp(min=1)",
        "the host does not read the gradient norm",
        _ONE_DEVICE,
    ),
    Mutation(
        "parallel/layers/heads_kernels.py",
        "@functools.cache",
        "",
        "constants are copied to the GPU once",
        _ONE_DEVICE,
    ),
    Mutation(
        "task/language.py",
        "self._documents(inputs_BS, rows[:, :-1])",
        "self._documents(inputs_BS, inputs_BS)",
        "documents are counted on the host",
        _STAGES,
    ),
    Mutation(
        "task/generation.py",
        "self.documents(ids, on_host)",
        "self.documents(ids, ids)",
        "documents of generated texts are counted on the host",
        _STAGES,
    ),
    Mutation(
        "monitor.py",
        'device="cpu", pin_memory=True)',
        'device="cpu")',
        "metrics are copied while the GPU continues",
        _ONE_DEVICE,
    ),
    Mutation(
        "data/loader.py",
        "return rows.pin_memory() if",
        "return rows if",
        "batches are copied while the GPU computes",
        _ONE_DEVICE,
    ),
    Mutation(
        "task/diffusion.py",
        "rows.to(sample_ids.device, non_blocking=True)",
        "rows.to(sample_ids.device)",
        "images are copied while the GPU computes",
        _IMAGES,
    ),
    Mutation(
        "checkpoint/saving.py",
        "HostMemory(pinned=on_gpu)",
        "HostMemory(pinned=False)",
        "a checkpoint is copied to the host while the GPU computes",
        _ONE_DEVICE,
    ),
    # The host reads before the GPU has written.
    Mutation(
        "monitor.py",
        "self.arrived.synchronize()",
        "pass",
        "metrics are read after their copy",
        _ONE_DEVICE,
    ),
    Mutation(
        "checkpoint/saving.py",
        "*([copied.synchronize] if copied else [])",
        "*[]",
        "a checkpoint is written after its copy to the host",
        _ONE_DEVICE,
    ),
    # A thread uses another GPU.
    Mutation("runtime/job.py", "gpu.select(device)", "pass", "a rank selects its GPU", _RUNS),
    Mutation("runtime/job.py", "watchdog.device = device", "pass", "the watchdog knows the GPU of its rank", _RUNS),
    Mutation("runtime/watchdog.py", "gpu.select(self.device)", "pass", "the watchdog uses the GPU of its rank", _RUNS),
    Mutation(
        "data/loader.py",
        '"loader", gpu.select, (device,))',
        '"loader")',
        "threads that load batches use the GPU of their rank",
        _ONE_DEVICE,
    ),
    Mutation(
        "checkpoint/saving.py",
        '"checkpoint", gpu.select, (device,))',
        '"checkpoint")',
        "the thread that saves uses the GPU of its rank",
        _ONE_DEVICE,
    ),
]


if __name__ == "__main__":
    sys.exit(run(MUTATIONS, list(map(int, sys.argv[1:])), only_listed=True))

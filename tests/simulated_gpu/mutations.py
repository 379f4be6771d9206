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
_DOCUMENTS = f"{_STEPS} -k separate"  # packed documents
_IMAGES = f"{_STEPS} -k unet"

# fmt: off
_FAULTS = [  # tests, module, claim, old fragment, new fragment
    # A stream does not wait for the producer of a tensor.
    (_STAGES, "parallel/resharding/transfer.py", "a link sends a tensor after it is computed",
     "link.stream.wait_event(self.started)", "pass"),
    (_STAGES, "parallel/resharding/transfer.py", "a stage computes with a tensor after it has arrived",
     "torch.cuda.current_stream(link.device).wait_event(self.stopped)", "pass"),
    (_STAGES, "parallel/resharding/transfer.py", "the end of a transfer is recorded after its messages",
     "            self.stopped = now(link.device)", "            self.stopped = self.started"),
    (_GRIDS, "parallel/weights.py", "a layer computes with a weight after it is gathered",
     "return pending.wait()", "return pending.result"),
    (_GRIDS, "parallel/comm/stats.py", "the computation waits for a collective that overlaps with it",
     "                    self.work.wait()", "                    pass"),
    (_GRIDS, "parallel/comm/stats.py", "the computation waits for a collective that does not overlap with it",
     "self.work.wait()\n                self._record_wait()", "self._record_wait()"),
    (_GRIDS, "parallel/gradient_reducer.py", "gradients are unpacked after they are reduced",
     "return pending.wait()", "return pending.result"),
    (_ONE_DEVICE, "checkpoint/saving.py", "a checkpoint is copied after the update",
     "self._stream.wait_stream(torch.cuda.current_stream())", "pass"),
    # An operation changes memory that another stream still reads.
    (_ONE_DEVICE, "checkpoint/saving.py", "the next update waits for the copy of a checkpoint",
     "torch.cuda.current_stream().wait_event(self._pending.copied)", "pass"),
    (_TIED, "parallel/pipeline/runtime.py",
     "an update waits until the weights of the previous update are sent to their copies",
     "exchange.wait_for_owned()", "pass"),
    (_TIED, "parallel/pipeline/runtime.py", "a forward waits for copies of another stage's weights",
     "            self.exchange.wait_for_held()", "            pass"),
    (_TIED, "task/averages.py", "averages replace weights after these are sent to their copies",
     "copies = set(self.stage.copies)\n        self.stage.wait_for_copies()", "copies = set(self.stage.copies)"),
    # Memory is freed early.
    (_STAGES, "parallel/resharding/transfer.py", "the memory of a sent tensor is not reused before it is sent",
     "local.record_stream(link.stream)", "pass"),
    (_GRIDS, "parallel/comm/pending.py",
     "the memory of a collective's input is not reused before the collective has ended",
     "self.source = source", "self.source = None"),
    # A wrong stream.
    (_GRIDS, "parallel/comm/stats.py", "the computation continues while a collective runs",
     "with torch.cuda.stream(self._watching):", "with nullcontext():"),
    (_STAGES, "parallel/resharding/transfer.py", "the computation continues while a link sends",
     "        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)",
     "        return nullcontext()"),
    # The host waits for the GPU.
    (_ONE_DEVICE, "step.py", "a step copies no number to the GPU",
     "stopping = torch.full((), float(stop), dtype=torch.float64, device=device)",
     "stopping = torch.tensor(float(stop), dtype=torch.float64, device=device)"),
    (_ONE_DEVICE, "parallel/pipeline/runtime.py", "the host does not read the loss of a microbatch",
     "self.total += loss.detach()", "self.total += loss.item()"),
    (_ONE_DEVICE, "optim/optimizer.py", "the host does not read the gradient norm",
     "divisor = (norm / limit).clamp(min=1)", "divisor = torch.full_like(norm, norm.item() / limit).clamp(min=1)"),
    (_ONE_DEVICE, "parallel/layers/heads.py", "constants are copied to the GPU once",
     "@functools.cache", ""),
    (_DOCUMENTS, "task/language.py", "documents are counted on the host",
     "self._documents(inputs_BS, rows[:, :-1])", "self._documents(inputs_BS, inputs_BS)"),
    (_DOCUMENTS, "task/generation.py", "documents of generated texts are counted on the host",
     "self.documents(ids, on_host)", "self.documents(ids, ids)"),
    (_ONE_DEVICE, "optim/monitor.py", "metrics are copied while the GPU continues",
     'device="cpu", pin_memory=True)', 'device="cpu")'),
    (_ONE_DEVICE, "data/loader.py", "batches are copied while the GPU computes",
     "return rows.pin_memory() if", "return rows if"),
    (_IMAGES, "task/diffusion.py", "images are copied while the GPU computes",
     "rows.to(sample_ids.device, non_blocking=True)", "rows.to(sample_ids.device)"),
    (_ONE_DEVICE, "checkpoint/saving.py", "a checkpoint is copied to the host while the GPU computes",
     "HostMemory(pinned=on_gpu)", "HostMemory(pinned=False)"),
    # The host reads before the GPU has written.
    (_ONE_DEVICE, "optim/monitor.py", "metrics are read after their copy",
     "self.arrived.synchronize()", "pass"),
    (_ONE_DEVICE, "checkpoint/saving.py", "a checkpoint is written after its copy to the host",
     "copied.synchronize()", "pass"),
    # A thread uses another GPU.
    (_RUNS, "runtime/job.py", "a rank selects its GPU",
     "gpu.select(device)", "pass"),
    (_RUNS, "runtime/job.py", "the watchdog knows the GPU of its rank",
     "watchdog.device = device", "pass"),
    (_RUNS, "runtime/watchdog.py", "the watchdog uses the GPU of its rank",
     "gpu.select(self.device)", "pass"),
    (_ONE_DEVICE, "data/loader.py", "threads that load batches use the GPU of their rank",
     '"loader", gpu.select, (device,))', '"loader")'),
    (_ONE_DEVICE, "checkpoint/saving.py", "the thread that saves uses the GPU of its rank",
     '"checkpoint", gpu.select, (device,))', '"checkpoint")'),
]
# fmt: on
MUTATIONS = [Mutation(file, old, new, claim, tests) for tests, file, claim, old, new in _FAULTS]


if __name__ == "__main__":
    sys.exit(run(MUTATIONS, list(map(int, sys.argv[1:])), only_listed=True))

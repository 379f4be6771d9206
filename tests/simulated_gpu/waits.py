"""The functions of gpt4d in which the host may wait for the GPU, as (file, qualified name)."""

# In a training step, and before the save of a checkpoint.
STEP = {
    ("gpt4d/optim/monitor.py", "PendingMetrics.read"),  # the metrics of the previous step
    ("gpt4d/optim/monitor.py", "all_finite"),
    ("gpt4d/parallel/layers/experts.py", "rows_per_rank"),
    ("gpt4d/checkpoint/saving.py", "Saver._write.<locals>.write"),  # the thread that writes the checkpoint
}
# Before the first step, and in the first call of functions with a cache.
FIRST = {
    ("gpt4d/parallel/comm/collectives.py", "probes.<locals>.exchange"),
    ("gpt4d/parallel/comm/stats.py", "seconds_between"),  # the first collective of a link
    ("gpt4d/parallel/layers/group_norm.py", "_index"),
    ("gpt4d/parallel/layers/heads.py", "_constant"),
    ("gpt4d/parallel/random.py", "intervals"),
    ("gpt4d/training/preflight.py", "compute"),
    ("gpt4d/task/diffusion_process.py", "DiffusionProcess.__init__.<locals>.<genexpr>"),
}
# Between steps: validation losses, communication times of a logged step, samples, and checkpoints that are loaded.
BETWEEN_STEPS = {
    ("gpt4d/checkpoint/tensor_files.py", "Files.read"),
    ("gpt4d/parallel/comm/stats.py", "seconds_between"),
    ("gpt4d/task/generation.py", "_Reader.read"),
    ("gpt4d/task/generation.py", "continued"),
    ("gpt4d/task/diffusion_process.py", "DiffusionProcess.__init__.<locals>.<genexpr>"),
    ("gpt4d/task/diffusion.py", "generated_images"),
    ("gpt4d/training/measuring.py", "Validation.evaluate"),
}
SYNCHRONOUS_SAVE = {("gpt4d/checkpoint/tensor_files.py", "write_values")}

"""A stand-in for python and train.py, which behaves for the batch scripts like train.py but starts at once.

The file ``plan`` in ``STAND_IN``, its run directory, has one line per start of the job: an exit code; ``listen`` to
wait for the signal, take a second to save and exit with 75; or ``deaf`` to be ended by the signal. A task of a job
array has a subdirectory for its own files.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path


def main() -> None:
    run_dir, overrides = Path(os.environ["STAND_IN"]), sys.argv[2:]
    rank, start = os.environ.get("SLURM_PROCID", "0"), int(os.environ.get("SLURM_RESTART_COUNT", "0"))
    directory = run_dir / os.environ.get("SLURM_ARRAY_TASK_ID", "")
    directory.mkdir(exist_ok=True)
    plan, saved = (run_dir / "plan").read_text().split()[start], directory / f"start{start}.saved"
    if "--cfg" in overrides:  # after the run a script queries run.dir, before it requeues the job
        if plan == "listen" and not saved.exists():
            sys.exit("the script did not wait for the save")
        print(run_dir)
        return

    def save(*_) -> None:
        time.sleep(1)
        saved.touch()
        sys.exit(75)

    if plan == "listen":
        for number in (signal.SIGUSR1, signal.SIGTERM):
            signal.signal(number, save)
    prefixes = ("SLURM_", "NCCL_", "FI_", "MIOPEN_", "CUDA_")  # other variables may be secret
    environment = {name: value for name, value in os.environ.items() if name.startswith(prefixes)}
    received = {"overrides": overrides, "program": sys.argv[1], "environment": environment}
    partial = directory / f"partial.{rank}"
    partial.write_text(json.dumps(received))
    partial.rename(directory / f"start{start}.rank{rank}.json")
    if plan in ("listen", "deaf"):
        while True:
            signal.pause()
    sys.exit(int(plan))


main()

"""In place of a virtual environment's python: train.py as the batch scripts see it, without its seconds of imports.

What it does at each start of the job stands in the file ``plan`` of ``STAND_IN``, its run directory, a line each: an
exit code; ``listen``: wait for the signal, take a second to save and exit with 75; ``deaf``: be ended by it.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path


def main() -> None:
    directory, words = Path(os.environ["STAND_IN"]), sys.argv[2:]
    rank, start = os.environ.get("SLURM_PROCID", "0"), int(os.environ.get("SLURM_RESTART_COUNT", "0"))
    plan, saved = (directory / "plan").read_text().split()[start], directory / f"start{start}.saved"
    if "--cfg" in words:  # a script asks when the run has ended, to go on from what it saved
        if plan == "listen" and not saved.exists():
            sys.exit("the script did not wait for the save")
        print(directory)
        return

    def save(*_) -> None:
        time.sleep(1)
        saved.touch()
        sys.exit(75)

    if plan == "listen":
        for number in (signal.SIGUSR1, signal.SIGTERM):
            signal.signal(number, save)
    ours = ("SLURM_", "NCCL_", "FI_", "MIOPEN_", "CUDA_")  # what else is in there may be secret
    environment = {name: value for name, value in os.environ.items() if name.startswith(ours)}
    seen = {"words": words, "program": sys.argv[1], "environment": environment}
    partial = directory / f"partial.{rank}"
    partial.write_text(json.dumps(seen))
    partial.rename(directory / f"start{start}.rank{rank}.json")
    if plan in ("listen", "deaf"):
        while True:
            signal.pause()
    sys.exit(int(plan))


main()

"""In place of a virtual environment's python: train.py as the batch scripts see it, without its seconds of imports.

What it does at each start of the job stands in the file ``plan`` of ``STAND_IN``, its run directory, a line each: an
exit code; ``listen``: wait for the signal and exit with 75; ``deaf``: be ended by it.
"""

import json
import os
import signal
import sys
from pathlib import Path


def main() -> None:
    directory, words = Path(os.environ["STAND_IN"]), sys.argv[2:]
    if "--cfg" in words:
        print(directory)
        return
    rank, start = os.environ.get("SLURM_PROCID", "0"), int(os.environ.get("SLURM_RESTART_COUNT", "0"))
    plan = (directory / "plan").read_text().split()[start]
    if plan == "listen":
        for number in (signal.SIGUSR1, signal.SIGTERM):
            signal.signal(number, lambda *_: sys.exit(75))
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

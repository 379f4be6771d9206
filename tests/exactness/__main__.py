"""Compare random configurations with the same configurations on one device.

    python -m tests.exactness FIRST:LAST [--verbose]

Each seed from FIRST up to, not including, LAST draws a configuration. ``--verbose`` prints all, otherwise failures.
"""

import os
import sys
from collections import Counter

os.environ.update(CUDA_VISIBLE_DEVICES="", HIP_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")

from tests.exactness.cases import draw
from tests.exactness.comparison import Result, check
from tests.support.rank_pool import RankPool


def _report(result: Result, verbose: bool) -> None:
    if result.problem:
        print(f"FAILED {result.case}\n{result.problem}", flush=True)
    elif verbose:
        found = " ".join(f"{kind} {difference:.1e}" for kind, difference in result.differences.items())
        print(f"{result.case}\n  {found or result.rejection}", flush=True)


def main(arguments: list[str]) -> int:
    verbose = "--verbose" in arguments
    first, last = map(int, next(argument for argument in arguments if ":" in argument).split(":"))
    pool, counts, worst = RankPool(), Counter[str](), dict[str, tuple[float, int]]()
    for seed in range(first, last):
        result = check(pool, draw(seed))
        _report(result, verbose)
        counts["failed" if result.problem else "rejected" if result.rejection else "exact"] += 1
        for kind, difference in result.differences.items():
            worst[kind] = max(worst.get(kind, (0.0, 0)), (difference, seed))
    pool.close()
    print(", ".join(f"{count} {what}" for what, count in counts.items()))
    print("largest differences:", ", ".join(f"{kind} {d:.1e} (seed {seed})" for kind, (d, seed) in worst.items()))
    return 1 if counts["failed"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""End all processes of a test run, and remove its directory, when the process that started the run has ended.

python reaper.py DIRECTORY PROCESS
"""

import shutil
import sys
from contextlib import suppress

import psutil


def processes_of(directory: str) -> list[psutil.Process]:
    """Return the processes that have the directory of a test run in their variables."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get("GPT4D_TEST_RUN") == directory and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def main(directory: str, owner: int) -> None:
    with suppress(psutil.NoSuchProcess):
        psutil.Process(owner).wait()
    while found := processes_of(directory):
        for process in found:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(found, timeout=5)
    shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))

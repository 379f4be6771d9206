"""Processes that end when their parent process ends for any reason."""

import ctypes
import os
import signal
import sys
import threading

_PR_SET_PDEATHSIG = 1


def end_with_parent(pipe: int) -> None:
    """End this process when its parent ends.

    On Linux the kernel ends it, even in the middle of native code. On other systems, and if the parent has ended before
    this call, a thread ends it. The parent's thread that started this process must live as long as the parent.

    Args:
        pipe: descriptor of the read end of a pipe. Only the parent holds the write end, and the parent writes nothing.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    threading.Thread(target=_wait_and_end, args=(pipe,), name="parent", daemon=True).start()


def _wait_and_end(pipe: int) -> None:
    while os.read(pipe, 1):
        pass
    os.kill(os.getpid(), signal.SIGKILL)

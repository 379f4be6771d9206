"""Standard output and standard error that may be lost: a closed pipe, a dead terminal, a log on a full disk."""

import io
import os
import sys


class _LossyFile(io.FileIO):
    """A file whose writes never fail. Content that cannot be written is lost."""

    def write(self, content) -> int:
        try:
            written = super().write(content)
        except OSError:
            written = None
        return len(memoryview(content).cast("B")) if written is None else written  # None: the pipe is full


def allow_lost_output() -> None:
    """Let prints of this process succeed even if its standard output and standard error are lost.

    The end of a terminal or of ``| head`` must not end a training, and a warning must not replace an error. Streams
    that the caller has replaced remain unchanged.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed by the shell: ``>&-``
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 – open until the process ends
        elif stream is getattr(sys, f"__{name}__"):
            file = _LossyFile(stream.fileno(), "w", closefd=False)
            lossy = io.TextIOWrapper(
                io.BufferedWriter(file),
                encoding=stream.encoding,
                errors=stream.errors,
                line_buffering=stream.line_buffering or stream.write_through,
            )
            setattr(sys, name, lossy)

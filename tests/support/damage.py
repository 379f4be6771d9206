"""Damage of the small files of a run: what crashes, bad disks and other users leave."""

import os
import random
from collections.abc import Callable
from pathlib import Path

_WRONG_TYPES = (
    b'[1]\n7\nnull\n{"step": "a", "elapsed_s": 1}\n{"step": null}\n{"elapsed_s": "a"}\n{"elapsed_s": 1e400}\n'
    b'{"step": NaN}\n{"event": [], "step": 1}\n{"config": 3}\n{"time": "a", "loss": "b"}\n'
    b'{"step": 1, "event": "validation", "sets": 3}\n'
    b'{"event": "validation", "time": 1, "sets": {"a": 3, "b": {"loss": "c"}}}\n{"time": 1e60, "event": "done"}\n'
)
_BOMB = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{new}: &{new} [{','.join([f'*{old}'] * 9)}]\n" for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)


def _replaced(create: Callable[[Path], object]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        path.unlink()
        create(path)

    return damage


def _changed(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    return lambda path: path.write_bytes(change(path.read_bytes())) and None


# By name: a function of the path of an existing file.
CONTENTS = {
    "random bytes": _changed(lambda content: content + random.Random(0).randbytes(200)),
    "a bad byte": _changed(lambda content: content[:20] + b"\xba" + content[21:]),
    "NULs": _changed(lambda content: bytes(len(content))),
    "cut": _changed(lambda content: content[:-10]),
    "empty": _changed(lambda content: b""),
    "wrong types": _changed(lambda content: content + _WRONG_TYPES),
    "nested": _changed(lambda content: content + b"[" * 100_000 + b"\n"),
    "nested object": _changed(lambda content: b'{"a": ' * 100_000),
    "bomb": _changed(lambda content: _BOMB.encode()),
}
NOT_FILES = {
    "FIFO": _replaced(os.mkfifo),
    "directory": _replaced(Path.mkdir),
    "link loop": _replaced(lambda path: path.symlink_to(path.name)),
}
DAMAGES = CONTENTS | NOT_FILES

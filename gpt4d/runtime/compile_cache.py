"""Caches of compiled kernels, in a directory that only the user can write to, because their content is executed."""

import os
import stat
import tempfile
from collections.abc import MutableMapping
from pathlib import Path

from gpt4d.runtime.errors import NodeError

# Subdirectory of each variable. MIOpen's caches contain SQLite files, which break on a shared file system.
_CACHES = {
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
    "MIOPEN_USER_DB_PATH": "miopen",
    "MIOPEN_CUSTOM_CACHE_DIR": "miopen",
}


def set_environment(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set cache variables that ``environment`` lacks to directories on this node, which later runs reuse.

    Raises NodeError if the private directory exists, but other users can write to it.
    """
    missing = {name: cache for name, cache in _CACHES.items() if not environment.get(name)}
    if not missing:
        return
    directory = _private_directory()
    for name, cache in missing.items():
        environment[name] = str(directory / cache)


def _private_directory() -> Path:
    directory = Path(tempfile.gettempdir()) / f"gpt4d-{os.getuid()}"
    try:
        directory.mkdir(mode=0o700, exist_ok=True)
        status = directory.lstat()
    except OSError as error:
        raise NodeError(f"{directory}: {error.strerror}; set TMPDIR to a directory of your own") from None
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise NodeError(
            f"{directory}: other users may have written to it, but compiled kernels in it are executed; remove it, or "
            "set TMPDIR to a directory of your own"
        )
    return directory

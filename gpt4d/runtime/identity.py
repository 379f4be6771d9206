"""The job's key: equal on all ranks of one start, and unknown to every other job."""

import hmac
import os
import secrets
import time
from pathlib import Path

from gpt4d.runtime.errors import ConfigError
from gpt4d.runtime.files import open_regular
from gpt4d.runtime.launch import Launch

VARIABLE = "GPT4D_SECRET"
_FILE = ".secret"
_BYTES = 32
WRITTEN_S = 30.0  # timeout for the content of a file that another node has created to appear


def job_key(launch: Launch, directory: Path | None = None) -> bytes:
    """Return the key of this start: a hash of the launcher's identification of the start and a secret.

    Args:
        launch: this process's rank in the job and its launcher.
        directory: the directory that contains the secret, on a file system that all ranks share. The first rank creates
            the secret; later starts use the same one. None: the user's cache directory. The variable GPT4D_SECRET
            replaces the file.

    Raises ConfigError if the secret can be neither read nor created, or if others could have written it.
    """
    secret = os.environ.get(VARIABLE) or _shared_secret(directory or _user_directory())
    return hmac.digest(os.fsencode(secret), start_name(launch).encode(), "sha256")


def start_name(launch: Launch) -> str:
    """Return a public name of this start. It is unique only if the launcher names starts."""
    return f"{launch.start}, sweep job {launch.sweep_job}, {launch.world_size} ranks"


def _shared_secret(directory: Path) -> str:
    path = directory / _FILE
    try:
        directory.mkdir(parents=True, exist_ok=True)
        _create(path)
        secret = _read(path)
    except OSError as error:
        raise ConfigError(
            f"{path}: {error.strerror}; make the directory writable and the file your own, or set {VARIABLE} to one "
            "text on all ranks"
        ) from None
    if len(secret) != 2 * _BYTES:
        raise ConfigError(f"{path}: incomplete; remove it, and the next start creates it")
    return secret


def _create(path: Path) -> None:
    """Create the secret unless it exists. Only this user can read it."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return
    try:
        with open(descriptor, "w", encoding="ascii") as file:
            file.write(secrets.token_hex(_BYTES))
    except OSError:
        path.unlink()
        raise


def _read(path: Path) -> str:
    """Return the secret. Wait if the rank that creates the file has not written it yet."""
    deadline = time.monotonic() + WRITTEN_S
    while len(secret := _content(path)) < 2 * _BYTES:
        if time.monotonic() > deadline:
            break
        time.sleep(0.05)
    return secret


def _content(path: Path) -> str:
    """Return the content of the secret's file. Raises ConfigError if another user can have written or read it."""

    def open_own(name: str, flags: int) -> int:
        return open_regular(name, flags | os.O_NOFOLLOW)

    with open(path, encoding="ascii", errors="replace", opener=open_own) as file:
        found = os.fstat(file.fileno())
        if found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise ConfigError(
                f"{path}: user {found.st_uid} owns it, with mode {found.st_mode & 0o777:04o}, but a secret must be "
                "your own with mode 0600; remove it, and the next start creates it"
            )
        return file.read(2 * _BYTES + 1)


def _user_directory() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "gpt4d"

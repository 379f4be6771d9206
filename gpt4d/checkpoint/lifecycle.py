"""The life cycle of a checkpoint directory: it is created, committed by a rename, and renamed before it is removed."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from gpt4d.checkpoint import checkpoint_dir
from gpt4d.checkpoint.tensor_files import Damaged
from gpt4d.config import ConfigError
from gpt4d.runtime.errors import warn
from gpt4d.runtime.files import sync

_PARTIAL, _REMOVED, _DAMAGED = ".partial", ".removed", ".damaged"
BEST = "best"  # link to the checkpoint with the lowest validation loss


def begin(run_dir: Path, step: int) -> Path:
    """Remove leftovers, and create and return the directory in which to write the checkpoint of a step.

    Raises OSError if it cannot be created, for example because a leftover at its path cannot be removed.
    """
    partial = run_dir / "checkpoints" / (checkpoint_dir.name(step) + _PARTIAL)
    if partial.exists():
        _remove(partial)
    remove_leftovers(run_dir)
    partial.mkdir(parents=True)
    for directory in (run_dir, run_dir.resolve().parent):
        sync(directory)
    return partial


def commit(partial: Path) -> Path:
    """Rename a finished checkpoint to its final name. Raises OSError if that name exists."""
    final = partial.with_suffix("")
    os.rename(partial, final)
    sync(final.parent)
    return final


def retain(newest: Path, keep: int, keep_every: int | None, keep_best: str | None = None) -> Path | None:
    """Remove all checkpoints except ``newest``, the ``keep`` - 1 before it, multiples of ``keep_every``, and the best.

    The best checkpoint has the lowest loss of the validation set ``keep_best``; it is marked and returned. Print a
    warning for a checkpoint that cannot be removed: the newest one is complete nevertheless. If a validation loss
    cannot be read, no checkpoint is removed.
    """
    run_dir = newest.parent.parent
    try:
        best = mark_best(run_dir, keep_best)
    except ConfigError as error:
        warn(f"the best checkpoint is not known ({error}), so no checkpoint is removed; a later save tries again")
        return None
    older = [path for path in checkpoint_dir.committed(run_dir) if path != newest]
    for path in older[: len(older) - (keep - 1)]:
        if path != best and (not keep_every or checkpoint_dir.step_of(path) % keep_every):
            with _warning(path):
                # Rename first, so that a partly removed checkpoint does not look complete.
                _remove(_add_suffix(path, _REMOVED))
    for path in checkpoint_dir.listing(run_dir):
        if path.name.endswith(_DAMAGED):
            with _warning(path):
                _remove(path)
    return best


def mark_best(run_dir: Path, validation_set: str | None) -> Path | None:
    """Let the link ``checkpoints/best`` name the checkpoint with the lowest loss of a validation set, and return it.

    The link is removed if ``validation_set`` is null or no checkpoint has its loss. The checkpoints contain the losses,
    so that a crash cannot separate them. Print a warning if the link cannot be written. Raises ConfigError if a loss
    cannot be read.
    """
    best = _best(run_dir, validation_set) if validation_set else None
    link = run_dir / "checkpoints" / BEST
    try:
        if best is None:
            link.unlink(missing_ok=True)
        elif not link.is_symlink() or os.readlink(link) != best.name:
            new = link.with_name(f"{BEST}.new")
            new.unlink(missing_ok=True)
            new.symlink_to(best.name)
            os.replace(new, link)
            sync(link.parent)
    except OSError as error:
        warn(f"{link} cannot be written ({error.strerror or error}); it should name {best and best.name}")
    return best


def _best(run_dir: Path, validation_set: str) -> Path | None:
    """Return the complete checkpoint with the lowest loss of a validation set; None if no checkpoint has its loss.

    Damaged metadata are ignored. Raises ConfigError if metadata cannot be read.
    """
    losses = {}
    for path in checkpoint_dir.committed(run_dir):
        with suppress(Damaged):
            if (loss := checkpoint_dir.Checkpoint(path).meta.validation.get(validation_set)) is not None:
                losses[path] = loss
    return min(losses, key=losses.__getitem__, default=None)


def quarantine(directory: Path) -> Path:
    """Rename a damaged checkpoint, so that it is not loaded. It remains for inspection until the next commit.

    Raises ConfigError if it cannot be renamed.
    """
    quarantined = directory.with_name(directory.name + _DAMAGED)
    try:
        if quarantined.exists():
            _remove(quarantined)
        return _add_suffix(directory, _DAMAGED)
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(f"{directory}: damaged, and cannot be renamed ({reason}); move it elsewhere") from None


def remove_leftovers(run_dir: Path) -> None:
    """Remove the leftovers of an interrupted save or removal. Print a warning for a leftover that cannot be removed."""
    for path in checkpoint_dir.listing(run_dir):
        if path.name.startswith("step_") and path.name.endswith((_PARTIAL, _REMOVED)):
            with _warning(path):
                _remove(path)


@contextmanager
def _warning(path: Path) -> Iterator[None]:
    """Print a warning if the body cannot remove ``path``. On NFS, a process that reads a checkpoint prevents that."""
    try:
        yield
    except OSError as error:
        warn(f"{path} cannot be removed ({error.strerror or error}) and takes disk space; a later save tries again")


def _remove(path: Path) -> None:
    """Remove a file or directory as far as possible. Raises OSError if a part of it cannot be removed."""
    if path.is_symlink() or not path.is_dir():
        path.unlink()
        return
    try:
        shutil.rmtree(path)
    except OSError:
        shutil.rmtree(path, ignore_errors=True)
        if path.exists():
            raise


def _add_suffix(directory: Path, suffix: str) -> Path:
    renamed = directory.with_name(directory.name + suffix)
    os.rename(directory, renamed)
    return renamed

"""Compiled kernels are cached where no other user can put one."""

import os
import tempfile
from pathlib import Path

import pytest
import torch

from gpt4d.parallel import compile
from gpt4d.runtime import compile_cache
from gpt4d.runtime.errors import NodeError

VARIABLES = ["TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "MIOPEN_USER_DB_PATH", "MIOPEN_CUSTOM_CACHE_DIR"]


@pytest.fixture
def private(tmp_path, monkeypatch) -> Path:
    """Return the private directory of this user, which does not exist yet."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path / f"gpt4d-{os.getuid()}"


def test_caches_are_in_a_directory_of_the_user_and_chosen_ones_stay(private):
    environment = {"TRITON_CACHE_DIR": "/chosen"}
    compile_cache.set_environment(environment)
    assert private.stat().st_mode & 0o777 == 0o700
    assert environment.pop("TRITON_CACHE_DIR") == "/chosen"
    assert sorted(environment) == sorted(set(VARIABLES) - {"TRITON_CACHE_DIR"})
    assert all(Path(path).parent == private for path in environment.values())
    again: dict[str, str] = {}
    compile_cache.set_environment(again)
    assert environment.items() <= again.items(), "later runs must find the kernels"


@pytest.mark.parametrize("kind", ["writable by others", "of another user", "a link", "a file"])
def test_a_directory_in_which_others_can_write_is_refused(private, monkeypatch, kind):
    if kind == "a link":
        (private.parent / "elsewhere").mkdir(mode=0o700)
        private.symlink_to("elsewhere")
    elif kind == "a file":
        private.touch(0o700)
    else:
        private.mkdir(mode=0o700)
    if kind == "writable by others":
        private.chmod(0o770)
    if kind == "of another user":
        user = os.getuid()
        private.rename(private.with_name(f"gpt4d-{user + 1}"))
        monkeypatch.setattr(os, "getuid", lambda: user + 1)
    with pytest.raises(NodeError, match=r"gpt4d-\d+: .*; (remove it, or )?set TMPDIR to a directory of your own"):
        compile_cache.set_environment({})


@pytest.mark.full
def test_a_model_that_is_compiled_uses_them(private, monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for test in ("missing_compiler", "_failure"):
        monkeypatch.setattr(compile, test, lambda device: None)
    try:
        compile.enable(False, torch.device("cpu"))
        assert not set(VARIABLES) & set(os.environ) and not private.exists()
        compile.enable(True, torch.device("cpu"))
        assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(private / "inductor")
    finally:
        compile.enable(False, torch.device("cpu"))
        for name in VARIABLES:
            os.environ.pop(name, None)

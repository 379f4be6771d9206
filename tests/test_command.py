"""The command gpt4d passes its arguments on, and an installed package works outside the clone."""

import importlib
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from gpt4d import __main__ as command
from gpt4d.config import CONFIG_DIR

REPOSITORY = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())


def started(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["gpt4d", *arguments])
    command.main()


@pytest.mark.parametrize("name", command.MODULES)
def test_a_command_passes_its_arguments_on(name, monkeypatch):
    received, listening = [], []
    monkeypatch.setattr(importlib.import_module(command.MODULES[name]), "main", received.append)
    monkeypatch.setattr(command, "end_on_signals", lambda: listening.append(name))
    started(monkeypatch, name, "a=1", "--help")
    assert received == [["a=1", "--help"]]
    assert listening == (["train"] if name == "train" else [])


def test_help_and_unknown_commands_name_the_commands(monkeypatch, capsys):
    started(monkeypatch)
    assert ", ".join(command.MODULES) in capsys.readouterr().out
    with pytest.raises(SystemExit):
        started(monkeypatch, "fly")
    assert capsys.readouterr().err == (
        f"error: gpt4d fly: there is no such command; use one of {', '.join(command.MODULES)}\n"
    )


def installed_files() -> set[Path]:
    """Return the files of a wheel, as pyproject.toml describes them, relative to the clone."""
    setuptools = PROJECT["tool"]["setuptools"]
    files = {path for path in REPOSITORY.glob("gpt4d/**/*.py") if (path.parent / "__init__.py").exists()}
    for package, patterns in setuptools["package-data"].items():
        folder = REPOSITORY / package.replace(".", "/")
        files |= {path for pattern in patterns for path in folder.glob(pattern)}
    return {path.relative_to(REPOSITORY) for path in files}


def test_a_wheel_has_all_configs_and_all_files_of_the_package():
    tracked = {
        Path(folder, name) for folder, _, names in os.walk(REPOSITORY / "gpt4d", followlinks=True) for name in names
    }
    expected = {path.relative_to(REPOSITORY) for path in tracked if path.suffix != ".pyc"}
    assert installed_files() == expected
    configs = {path.relative_to(CONFIG_DIR) for path in CONFIG_DIR.rglob("*.yaml")}
    assert {Path("gpt4d/config/files") / path for path in configs} <= expected and len(configs) > 50


@pytest.mark.slow
def test_an_installed_package_trains_from_an_empty_folder(tmp_path):
    for path in installed_files():
        (tmp_path / "site" / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(REPOSITORY / path, tmp_path / "site" / path)
    folder, script = tmp_path / "folder", PROJECT["project"]["scripts"]["gpt4d"]
    folder.mkdir()
    module, _, function = script.partition(":")
    words = ["train", "model=unet_50m", "cluster=dgx_h100", "--dry-run"]
    program = f"import sys; sys.argv[1:] = {words}; from {module} import {function}; {function}()"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    done = subprocess.run(
        [sys.executable, "-P", "-c", program], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "runs/unet_50m-blue_marble" in done.stdout and not any(folder.iterdir())

"""The package: its metadata, its layers, the files of a wheel, and the command gpt4d. README leads to every page."""

import ast
import importlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import gpt4d
from gpt4d import __main__ as command
from gpt4d.config import CONFIG_DIR, ConfigError, compose
from tests.support.environment import REPOSITORY
from tests.support.pages import pinned_versions

PYPROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]


def links(page: Path) -> set[Path]:
    """Return the files of the repository that a Markdown page links to or shows."""
    targets = re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8"))
    return {(page.parent / target).resolve() for target in targets if "://" not in target}


def reachable_from_readme() -> set[Path]:
    reached, waiting = set(), [REPOSITORY / "README.md"]
    while waiting:
        page = waiting.pop()
        new = (links(page) if page.suffix == ".md" else set()) - reached
        assert all(path.exists() for path in new), f"{page}: {[str(path) for path in new if not path.exists()]}"
        reached |= new
        waiting += new
    return reached


def imported_parts(path: Path) -> set[str]:
    """Return the packages and modules of gpt4d that a file imports, other than for its annotations."""
    tree, names = ast.parse(path.read_text(encoding="utf-8")), []
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = []
        elif isinstance(node, ast.ImportFrom) and node.module:
            names += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
    return {name.split(".")[1] for name in names if name.startswith("gpt4d.")}


def test_packages_import_downward_only():
    page = (REPOSITORY / "docs/reference/architecture.md").read_text(encoding="utf-8")
    order = re.findall(r"^gpt4d/(\w+)", page, re.MULTILINE)
    # The command of a package, __main__.py, may import other packages: nothing imports it.
    parts = {
        path.stem: [path] if path.is_file() else [file for file in path.rglob("*.py") if file.stem != "__main__"]
        for path in REPOSITORY.glob("gpt4d/[a-z]*")
    }
    assert sorted(order) == sorted(parts)
    for place, name in enumerate(order):
        imports = set().union(*map(imported_parts, parts[name])) & set(order)
        assert imports <= set(order[: place + 1]), f"gpt4d/{name} imports {imports - set(order[: place + 1])}"


def test_class_names_are_unique():
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in (REPOSITORY / "gpt4d").rglob("*.py")]
    counts = Counter(node.name for tree in trees for node in tree.body if isinstance(node, ast.ClassDef))
    assert not [name for name, count in counts.items() if count > 1]


def test_pins_lie_inside_the_ranges_of_the_package_and_the_version_is_that_of_the_metadata():
    assert gpt4d.__version__ == PROJECT["version"]
    ranges = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["dev"]]
    allowed = {requirement.name: requirement.specifier for requirement in map(Requirement, ranges)}
    pins = pinned_versions()
    assert pins.keys() == allowed.keys()
    assert not {name: version for name, version in pins.items() if version not in allowed[name]}


def test_readme_is_short_and_leads_to_every_page():
    assert len((REPOSITORY / "README.md").read_text(encoding="utf-8").splitlines()) <= 120
    pages = {*(REPOSITORY / "docs").rglob("*.md"), REPOSITORY / "CONTRIBUTING.md", REPOSITORY / "CHANGELOG.md"}
    assert not pages - reachable_from_readme()


def test_make_rejects_an_old_python_in_one_line(tmp_path):
    old = tmp_path / "python"
    old.write_text(f'#!/bin/sh\nexec "{sys.executable}" -c "import sys; sys.version_info = (3, 10); $2"\n')
    old.chmod(0o755)
    command = ["make", f"VENV={tmp_path / 'venv'}", f"PYTHON={old}", "train"]
    made = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert made.returncode
    (error,) = [line for line in made.stderr.splitlines() if not line.startswith("make")]
    assert error.startswith("error: gpt4d needs Python 3.11 or newer")
    assert not (tmp_path / "venv").exists()


def test_missing_configs_name_the_remedy(monkeypatch, tmp_path):
    monkeypatch.setattr(f"{compose.__module__}.CONFIG_DIR", tmp_path / "configs")
    with pytest.raises(ConfigError, match=r"no such directory; install gpt4d again"):
        compose()


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
    expected = f"error: gpt4d fly: there is no such command; use one of {', '.join(command.MODULES)}\n"
    assert capsys.readouterr().err == expected


def installed_files() -> set[Path]:
    """Return the files of a wheel, as pyproject.toml describes them, relative to the clone."""
    setuptools = PYPROJECT["tool"]["setuptools"]
    files = {path for path in REPOSITORY.glob("gpt4d/**/*.py") if (path.parent / "__init__.py").exists()}
    for package, patterns in setuptools["package-data"].items():
        folder = REPOSITORY / package.replace(".", "/")
        files |= {path for pattern in patterns for path in folder.glob(pattern)}
    return {path.relative_to(REPOSITORY) for path in files}


def test_a_wheel_has_all_configs_and_all_files_of_the_package():
    files = (
        Path(folder, name) for folder, _, names in os.walk(REPOSITORY / "gpt4d", followlinks=True) for name in names
    )
    expected = {path.relative_to(REPOSITORY) for path in files if path.suffix != ".pyc"}
    assert installed_files() == expected
    configs = {path.relative_to(CONFIG_DIR) for path in CONFIG_DIR.rglob("*.yaml")}
    assert {Path("gpt4d/config/files") / path for path in configs} <= expected and len(configs) > 50


@pytest.mark.slow
def test_an_installed_package_trains_from_an_empty_folder(tmp_path):
    for path in installed_files():
        (tmp_path / "site" / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(REPOSITORY / path, tmp_path / "site" / path)
    folder, script = tmp_path / "folder", PROJECT["scripts"]["gpt4d"]
    folder.mkdir()
    module, _, function = script.partition(":")
    words = ["train", "model=unet_50m", "cluster=dgx_h100", "--dry-run"]
    program = f"import sys; sys.argv[1:] = {words}; from {module} import {function}; {function}()"
    command, environment = [sys.executable, "-P", "-c", program], {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "runs/unet_50m-blue_marble" in done.stdout and not any(folder.iterdir())

"""The package's metadata agree with each other, and README leads to every page of the documentation."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import gpt4d
from gpt4d.config import ConfigError, compose

REPOSITORY = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]


def pinned_versions() -> dict[str, str]:
    """Return the version of each package in requirements.txt, which must be one exact version."""
    lines = (REPOSITORY / "requirements.txt").read_text().splitlines()
    pins = [Requirement(line.partition("#")[0]) for line in lines if line.partition("#")[0].strip()]
    specifiers = {pin.name: list(pin.specifier) for pin in pins}
    assert all(len(s) == 1 and s[0].operator == "==" for s in specifiers.values()), specifiers
    return {name: specifier[0].version for name, specifier in specifiers.items()}


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
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = []
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
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


def test_pins_lie_inside_the_ranges_of_the_package():
    ranges = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["dev"]]
    allowed = {requirement.name: requirement.specifier for requirement in map(Requirement, ranges)}
    pins = pinned_versions()
    assert pins.keys() == allowed.keys()
    assert not {name: version for name, version in pins.items() if version not in allowed[name]}


def test_version_is_that_of_the_metadata():
    assert gpt4d.__version__ == PROJECT["version"]


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
    errors = [line for line in made.stderr.splitlines() if not line.startswith("make")]
    assert len(errors) == 1
    assert errors[0].startswith("error: gpt4d needs Python 3.11 or newer")
    assert not (tmp_path / "venv").exists()


def test_missing_configs_name_the_remedy(monkeypatch, tmp_path):
    monkeypatch.setattr(f"{compose.__module__}.CONFIG_DIR", tmp_path / "configs")
    with pytest.raises(ConfigError, match=r"no such directory; install gpt4d again"):
        compose()

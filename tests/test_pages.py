"""The pages name what exists: modules, functions, files, models and results. Every result has a page."""

import ast
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest

from gpt4d.config import CONFIG_DIR, known_keys
from tests.support.environment import REPOSITORY

DOCS = sorted((REPOSITORY / "docs").rglob("*.md"))
PAGES = [*DOCS, *REPOSITORY.glob("*.md"), *(REPOSITORY / "scripts").rglob("*.md")]
MODULES = sorted((REPOSITORY / "gpt4d").rglob("*.py"))
SOURCES = {path: path.read_text(encoding="utf-8") for path in MODULES}
# Files, and a tag of MLflow's runs.
_OTHER = {"gpt4d.def", "gpt4d.sif", "gpt4d.py", "gpt4d.run_id"}


@cache
def defined(path: Path) -> set[str]:
    """Return the functions, classes, variables, attributes and imports that a module contains, by name."""
    names = set()
    for node in ast.walk(ast.parse(SOURCES[path])):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.alias):
            names.add(node.name)
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(node.id if isinstance(node, ast.Name) else node.attr)
    return names


def missing_names(text: str) -> set[str]:
    """Return the names ``gpt4d.a.b.c`` in ``text`` whose module, or a name in that module, does not exist."""
    missing = set()
    for name in {*re.findall(r"\bgpt4d(?:\.[A-Za-z_]\w*)+", text)} - _OTHER:
        path, parts = REPOSITORY / "gpt4d", name.split(".")[1:]
        while parts and (path / parts[0]).is_dir():
            path /= parts.pop(0)
        if parts and (path / f"{parts[0]}.py").exists():
            path = path / f"{parts.pop(0)}.py"
        if parts and {*parts} - defined(path / "__init__.py" if path.is_dir() else path):
            missing.add(name)
    return missing


def missing_paths(text: str, folder: Path) -> set[str]:
    """Return the paths of Python files in ``text`` that exist in none of ``folder``, the repository and the package."""
    paths = {path for path in re.findall(r"(?<!Megatron's )(?<![\w./-])[\w./-]+\.py\b", text) if "/" in path}
    roots = (folder, REPOSITORY, REPOSITORY / "gpt4d")
    return {path for path in paths if not any((root / path).exists() for root in roots)}


def test_every_name_and_path_of_a_module_in_a_page_or_a_module_exists():
    texts = SOURCES | {page: page.read_text(encoding="utf-8") for page in PAGES}
    wrong = {path: missing_names(text) | missing_paths(text, path.parent) for path, text in texts.items()}
    assert not {path: names for path, names in wrong.items() if names}


def test_a_wrong_name_or_path_is_found():
    assert missing_names("`gpt4d.training.trainer.Trainer`, gpt4d.model.family") == set()
    wrong = {"gpt4d.trainers", "gpt4d.runs.logger.Logger", "gpt4d.model.gpt2.Coach"}
    assert missing_names(" ".join(wrong)) == wrong
    assert missing_paths("`model/family.py`, gpt4d/plan.py, [a](tests/conftest.py), model/fam.py", REPOSITORY) == {
        "model/fam.py"
    }


def test_the_names_on_the_page_of_the_architecture_exist_where_it_says():
    text = re.sub(r"```.*?```", "", (REPOSITORY / "docs/reference/architecture.md").read_text(), flags=re.DOTALL)
    codes = [code for code in re.findall(r"`([^`]+)`", text) if not re.search(r"[/=]|\.(json|py)\b", code)]
    names = {name for code in codes for name in re.findall(r"[A-Za-z_][\w.]*\w", code)}
    assert len(names) > 30
    for name in sorted(names - {*known_keys()}):
        *owner, last = name.split(".")
        if owner:
            modules = [path for path in MODULES if path.stem == owner[-1] or owner[-1] in defined(path)]
            assert any(last in defined(path) for path in modules), name
        else:
            assert any(re.search(rf"\b{last}\b", source) for source in SOURCES.values()), name


def test_the_page_of_model_families_names_every_model_once():
    text = (REPOSITORY / "docs/guides/models.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| .*? \| (.*`\w+_tiny`.*) \|$", text, re.MULTILINE)
    names = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert sorted(names) == sorted(path.stem for path in (CONFIG_DIR / "model").glob("*_*.yaml"))


def test_a_page_has_200_words_or_more_and_is_in_the_navigation_of_the_site():
    assert not [page for page in DOCS if len(page.read_text(encoding="utf-8").split()) < 200]
    listed = re.findall(r"([\w/]+\.md)\n", (REPOSITORY / "mkdocs.yml").read_text(encoding="utf-8").partition("nav:")[2])
    own = [name for name in listed if not name.startswith("repository/")]
    assert sorted(own) == sorted(page.relative_to(REPOSITORY / "docs").as_posix() for page in DOCS)


def headings(page: Path) -> set[str]:
    """Return the anchors of the headings of a page, as GitHub and the site name them."""
    found = re.findall(r"^#+ (.*)", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in found}


def test_every_link_to_a_heading_leads_to_one():
    for page in PAGES:
        for target, anchor in re.findall(r"\]\(([^)#\s:]*)#([^)\s]+)\)", page.read_text(encoding="utf-8")):
            assert anchor in headings((page.parent / target) if target else page), f"{page}: {target}#{anchor}"


@pytest.mark.skipif(not (shutil.which("git") and (REPOSITORY / ".git").exists()), reason="needs a clone and git")
def test_every_result_in_the_repository_is_cited_on_a_page():
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    command = ["git", "ls-files", "benchmarks/results"]  # not what a benchmark has just written
    results = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout.split()
    assert len(results) > 50
    assert not [result for result in results if result not in text]

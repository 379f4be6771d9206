"""Hooks of mkdocs: pages of the API, and files outside docs/ that pages link to.

A link of a page names a file of the repository, so that it works without mkdocs. A file outside docs/ becomes
``repository/PATH`` in the site, and links to it are rewritten.
"""

import os
import posixpath
import re
from pathlib import Path

from mkdocs.structure.files import File

_REPOSITORY = Path(__file__).parents[1]
_LINK = re.compile(r"(\]\()([^)#\s]+)")


def _modules() -> dict[str, list[str]]:
    """Return the public modules of each package: names without an underscore that have a docstring or code."""
    packages: dict[str, list[str]] = {}
    for path in sorted(_REPOSITORY.glob("gpt4d/**/*.py")):
        parts = path.relative_to(_REPOSITORY).with_suffix("").parts
        if parts[-1] == "__init__":
            parts = parts[:-1]
        if not any(part.startswith("_") for part in parts) and path.stat().st_size:
            package = parts if path.name == "__init__.py" else parts[:-1]
            packages.setdefault(".".join(package), []).append(".".join(parts))
    return packages


def _site_path(path: str) -> str:
    """Return the path in the site of a file of the repository."""
    return path.removeprefix("docs/") if path.startswith("docs/") else f"repository/{path}"


def _targets(page: str) -> set[str]:
    """Return the files of the repository that a page of the repository links to."""
    text = (_REPOSITORY / page).read_text(encoding="utf-8")
    links = {link for _, link in _LINK.findall(text) if "://" not in link}
    return {posixpath.normpath(posixpath.join(posixpath.dirname(page), link)) for link in links}


def on_config(config):
    """Add the pages of the API to the navigation."""
    api = [{"API": "api/index.md"}]
    for package, modules in _modules().items():
        api.append({package: [{module: f"api/{module}.md"} for module in modules]})
    config["nav"].append({"API": api})
    return config


def on_files(files, config):
    """Add the pages of the API, and the files of the repository that pages link to."""
    waiting = [path.relative_to(_REPOSITORY).as_posix() for path in sorted(_REPOSITORY.glob("docs/**/*.md"))]
    seen = set(waiting)
    while waiting:
        for target in sorted(_targets(waiting.pop()) - seen):
            seen.add(target)
            if not target.startswith("docs/"):
                source = str(_REPOSITORY / target)
                files.append(File.generated(config, _site_path(target), abs_src_path=source))
                waiting += [target] if target.endswith(".md") else []
    index = ["# API", "", "Modules with docstrings, by package.", ""]
    for package, modules in _modules().items():
        index += [f"## {package}", "", *(f"- [`{module}`]({module}.md)" for module in modules), ""]
        for module in modules:
            content = f"# `{module}`\n\n::: {module}\n"
            files.append(File.generated(config, f"api/{module}.md", content=content))
    files.append(File.generated(config, "api/index.md", content="\n".join(index)))
    return files


def on_page_markdown(markdown, page, config, files):
    """Return a page whose links to files of the repository lead to their copies."""
    source = page.file.src_uri
    if source.startswith("api/"):
        return markdown
    own = source.removeprefix("repository/") if source.startswith("repository/") else f"docs/{source}"

    def rewrite(match):
        if "://" in match[2]:
            return match[0]
        target = posixpath.normpath(posixpath.join(posixpath.dirname(own), match[2]))
        return match[1] + posixpath.relpath(_site_path(target), posixpath.dirname(source) or os.curdir)

    return _LINK.sub(rewrite, markdown)

"""Files of the repository that several tests read: commands and modules of pages, pinned versions."""

import re
from pathlib import Path

from packaging.requirements import Requirement

from tests.support.environment import REPOSITORY


def commands_of(page: Path) -> list[str]:
    """Return the commands in the page's code blocks, in order and in one line each, without comments."""
    blocks = page.read_text(encoding="utf-8").split("```")[1::2]
    commands = "".join(block.removeprefix("\n") for block in blocks if block.startswith("\n"))
    lines = commands.replace("\\\n", " ").splitlines()
    return [" ".join(line.partition("  #")[0].split()) for line in lines]


def modules_of(page: Path) -> dict[str, str]:
    """Return the Python files that a page shows, by name."""
    text = page.read_text(encoding="utf-8")
    return dict(re.findall(r"\(`(\w+\.py)`\):\n\n```python\n(.*?)```", text, re.DOTALL))


def overridden(words: list[str], overrides: list[str]) -> list[str]:
    """Return a command whose overrides are replaced by ``overrides`` of the same key, and extended by the rest."""
    keys = {override.partition("=")[0] for override in overrides}
    return [word for word in words if word.partition("=")[0] not in keys] + overrides


def pinned_versions() -> dict[str, str]:
    """Return the version of each package in requirements.txt, which must be one exact version."""
    lines = (REPOSITORY / "requirements.txt").read_text().splitlines()
    pins = [Requirement(line.partition("#")[0]) for line in lines if line.partition("#")[0].strip()]
    specifiers = {pin.name: list(pin.specifier) for pin in pins}
    assert all(len(s) == 1 and s[0].operator == "==" for s in specifiers.values()), specifiers
    return {name: specifier[0].version for name, specifier in specifiers.items()}

"""Every message that docs/troubleshooting.md quotes exists in the source."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/troubleshooting.md"
_SHORTEST = 4  # letters of a message without its values


def quoted() -> list[str]:
    """Return the code in the first cell of each row of a table: messages and keys of metrics.jsonl."""
    rows = re.findall(r"^\| (.*?) \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    return [message for cell in rows for message in re.findall(r"`([^`]+)`", cell)]


def texts(source: str) -> list[str]:
    """Return the texts in a module other than docstrings; ``…`` stands for the values of f-strings."""
    tree = ast.parse(source)
    statements = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    parts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    found = []
    for node in ast.walk(tree):
        if id(node) in statements | parts:
            continue
        if isinstance(node, ast.JoinedStr):
            values = (part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
            found.append("".join(map(str, values)))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(node.value)
    return found


@pytest.fixture(scope="module")
def sources() -> list[str]:
    return [text for path in (ROOT / "gpt4d").rglob("*.py") for text in texts(path.read_text(encoding="utf-8"))]


def is_in(message: str, sources: list[str]) -> bool:
    """Return whether a text contains ``message``, in which each ``…`` stands for any characters."""
    pattern = re.compile(".*".join(map(re.escape, message.split("…"))))
    return any(pattern.search(text) for text in sources)


@pytest.mark.parametrize("message", sorted(code for code in {*quoted()} if " " in code))
def test_a_quoted_message_exists_in_the_source(message, sources):
    assert len(re.findall(r"\w", message)) >= _SHORTEST, message
    assert is_in(message, sources)


@pytest.mark.parametrize("key", sorted(code for code in {*quoted()} if " " not in code))
def test_a_quoted_key_of_metrics_exists_in_the_source(key, sources):
    assert all(is_in(part, sources) for part in key.split("."))


def test_the_texts_of_a_module_are_complete_and_contain_no_docstrings():
    assert texts('"""A."""\nx = f"b {c} d" "e"\ny = "f" "g"\n') == ["b … de", "fg"]
    assert is_in("b … de", ["a b … de"]) and not is_in("d … b", ["b … de"])

"""Reference of all settings, and the help of train.py: both print the metadata of the fields."""

import re
from collections.abc import Sequence
from dataclasses import MISSING, is_dataclass
from textwrap import fill

from gpt4d.config.composing import CONFIG_DIR, choices, compose, format_for_hydra
from gpt4d.config.keys import Setting, groups, meant_key, settings, unknown_key
from gpt4d.config.schema import GRID_KEYS, Config

# Settings that most users change first.
FIRST = (
    "model", "data", "train.steps", "train.batch_size", "train.micro_batch_size", "optim.lr",
    *(f"parallel.{key}" for key in (*GRID_KEYS, "mode")), "checkpoint.every", "run.dir",
)  # fmt: skip
_HELP = """usage: python train.py [KEY=VALUE …] [--dry-run] [--cfg job] [-m]

Settings that most users change first, with their defaults:
{first}

Choices of the groups:
{choices}

python -m gpt4d.config optim.lr explains a key, and python -m gpt4d.config warmup finds keys.
--dry-run predicts the run, --cfg job prints its configuration, and -m trains every combination of several values."""


def train_help() -> str:
    """Return the help of train.py: the first settings, and the choices of each group."""
    composed, found = compose(), {each.key: each for each in settings()}
    lines = []
    for key in FIRST:
        field = Config.__dataclass_fields__[key] if key in groups() else found[key].field
        default = getattr(composed, key).name if key in groups() else default_text(found[key])
        lines.append(_paragraph(f"{key}={default}", field.metadata["meaning"]))
    names = sorted(path.name for path in CONFIG_DIR.iterdir() if path.is_dir())
    return _HELP.format(first="\n".join(lines), choices="\n".join(_paragraph(n, ", ".join(choices(n))) for n in names))


def explain(words: Sequence[str]) -> str:
    """Return key, type, default, limits and meaning of the key ``words``, or of all keys that contain every word.

    Raises ConfigError if there is no such key.
    """
    known = list(settings())
    found = [each for each in known if [each.key] == [*words]]
    if not found:
        found = [each for each in known if all(word.lower() in _explanation(each).lower() for word in words)]
    if not found:
        meant = meant_key(" ".join(words))
        found = [each for each in known if each.key == meant]
    if not found:
        raise unknown_key(" ".join(words))
    families: dict[str, list[str]] = {}  # model families, by the explanation of their common setting
    for each in found:
        families.setdefault(_explanation(each), []).append(each.family)
    return "\n".join(
        text.replace("\n", f"  [{', '.join(names)}]\n" if any(names) else "\n", 1) for text, names in families.items()
    )


def default_text(setting: Setting) -> str:
    """Return the default of a setting as it is written on a command line."""
    default, factory = setting.field.default, setting.field.default_factory
    if factory is not MISSING:
        default = [vars(item) if is_dataclass(item) else item for item in factory()]
    if isinstance(default, str):
        return re.sub(r"\$\{oc\.select:([\w.]+),\w+\}", r"${\1}", default)  # without the fallback value
    return str(default).lower() if isinstance(default, bool) else format_for_hydra(default)


def _explanation(setting: Setting) -> str:
    """Return the line of a setting and the line of its meaning."""
    kind = re.sub(r"<class '|'>|\b\w+\.", "", str(setting.type)).replace(" | None", " or null")
    limits = str(setting.field.metadata.get("limits", ""))
    first = f"{setting.key}={default_text(setting)}  ({kind}{', ' * bool(limits)}{limits})"
    return f"{first}\n    {setting.field.metadata.get('meaning', '')}"


def _paragraph(name: str, text: str) -> str:
    return fill(f"{name:28} {text}", 120, initial_indent="  ", subsequent_indent=" " * 31, break_on_hyphens=False)

"""The model card of an export: README.md with data, progress, settings, losses and the code's version."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData

import gpt4d
from gpt4d.checkpoint.checkpoint_dir import Checkpoint
from gpt4d.model import registry
from gpt4d.model.family import HuggingFaceAdapter
from gpt4d.runs import starts
from gpt4d.runtime.files import read_json_lines
from gpt4d.runtime.writing import required_file


def model_card(checkpoint: Checkpoint, adapter: HuggingFaceAdapter, weights: str) -> str:
    """Return the model card of a checkpoint's model in Markdown.

    Losses and commit come from the run directory that contains the checkpoint. Without a run directory, they are
    omitted.
    ``weights`` describes the exported weights.
    """
    meta, run_dir = checkpoint.meta, checkpoint.path.resolve().parents[1]
    family = registry.of(meta.model)
    library = adapter.CLASS.partition(".")[0]
    data = ModelCardData(library_name=library, pipeline_tag=adapter.PIPELINE_TAG, tags=["gpt4d"])
    description = registry.describe(meta.model)
    facts: dict[str, Any] = {"parameters": f"{description.num_parameters:,}"}
    if description.unused_parameters:
        facts["active parameters"] = f"{description.active_parameters:,}"
    facts["weights"] = weights
    if meta.grids:
        facts |= {"data": meta.identity.get("data", ""), "steps": f"{meta.progress.step:,}"}
        facts[family.unit] = f"{meta.progress.units:,}"
        facts |= _losses(run_dir, meta.progress.step) | _commit(run_dir, meta.progress.step)
    else:
        facts["imported from"] = meta.identity.get("data", "")
    facts["gpt4d"] = gpt4d.__version__
    settings = {f"model.{key}": getattr(meta.model, key) for key in family.structure} | meta.settings
    return (
        f"---\n{data.to_yaml()}\n---\n\n# {run_dir.name}\n\n"
        f"A model of the family {family.name}, for {meta.task.replace('_', ' ')}, written by gpt4d.\n\n"
        f"{_table('', '', facts)}\n"
        f"```python\n{adapter.USAGE}```\n\n"
        f"## Settings\n\n{_table('key', 'value', settings)}"
    )


def _losses(run_dir: Path, step: int) -> dict[str, str]:
    path = run_dir / "metrics.jsonl"
    with required_file(path):
        lines = [line for line in read_json_lines(path) if line.get("step", step + 1) <= step]
    found = {}
    for name, event in (("training loss", None), ("validation loss", "validation")):
        values = [line for line in lines if line.get("event") == event and line.get("loss") is not None]
        if values:
            found[name] = f"{values[-1]['loss']:.4f} at step {values[-1]['step']:,}"
    return found


def _commit(run_dir: Path, step: int) -> dict[str, str]:
    """Return the commit of the last start before ``step``."""
    commits = [start for start in starts.read(run_dir) if start.get("step", step) < step and start.get("commit")]
    if not commits:
        return {}
    last = commits[-1]
    return {"commit": last["commit"] + ("" if last.get("clean") else ", with uncommitted changes")}


def _table(key: str, value: str, rows: Mapping[str, Any]) -> str:
    lines = [f"| {key} | {value} |", "|---|---|"]
    for name, content in rows.items():
        text = " ".join(str(content).split()).replace("|", "\\|")
        lines.append(f"| {name} | {text} |")
    return "\n".join(lines) + "\n"

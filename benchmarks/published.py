"""Published training runs of other trainers, as runs of the planner.

A row states model, parallel sizes, batch and hardware (``published.json``). Its trainer and its machine decide the
remaining settings. Rows that gpt4d has no counterpart for are not planned, with a reason.
"""

import bisect
import json
import math
import re
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from benchmarks.machines import machine_of
from gpt4d.config import Config, ConfigError, compose, divisors
from gpt4d.config.machine import gpu_model
from gpt4d.config.trainer_profiles import PROFILES, TrainerProfile
from gpt4d.data.completion import complete
from gpt4d.model import registry
from gpt4d.planner.published import FEWEST, LONGEST
from gpt4d.planner.resolve import resolve
from gpt4d.planner.search import rank
from gpt4d.planner.stages import PlanEstimate

ROWS = str(Path(__file__).with_name("published.json"))
_PRECISIONS = {"fp16": "bf16", "bf16": "bf16", "fp8": "fp8", "float8": "fp8", "mxfp8": "fp8"}
_FAMILIES = {"gpt2": "gpt_20b", "gpt2 layers only": "gpt_20b", "llama": "llama3_8b", "qwen3_moe": "qwen3_moe_30b"}
_DENSE = "gpt2", "llama"  # families whose published MFU is tabulated
_BILLIONS = 0.1, 1, 4, 10, 50, 150, 1100  # borders between sizes of models, away from the usual 7, 8, 13, 30 and 70
_CHECKPOINTING = {"full": "full", "selective per op": "selective"}
_MICRO_BATCHES = 8, 4, 2, 1  # tried if a row does not state the size
_LAYERS_ONLY_VOCABULARY = 256  # vocabulary of a row without embedding and head


_TRAINERS = {
    "Megatron Bridge": "megatron",
    "Megatron": "megatron-2021",
    "DeepSpeed-3D": "megatron-2021",
    "ATP": "megatron-2021",
    "MosaicML": "llm-foundry",
    "InternEvo": "internevo",
    "torchtitan": "torchtitan",
    "Meta": "torchtitan",
    "AxoNN": "axonn",
    "ZeRO-3": "zero-3",
}  # by the first words of a row's system


def trainer_of(row: dict) -> str | None:
    """Return the name of the profile of a row's trainer; None if it is unknown."""
    name = next((name for words, name in _TRAINERS.items() if row["system"].startswith(words)), None)
    if name == "megatron-2021" and "2205.05198" in row["source"]:
        return "megatron-2022" if row["recomputation"] == "full" else "megatron-2022-selective"
    if name == "torchtitan" and ("eager" in row["id"] or "without torch.compile" in row["note"]):
        return "torchtitan-eager"
    if name == "torchtitan" and "async tensor" in row["note"]:
        return "torchtitan-async"
    return name


class NotPlanned(Exception):
    """The planner has no counterpart of a published run."""


def read_rows(path: str) -> list[dict]:
    """Return the rows of a file. Raises ConfigError if it is not such a file."""
    try:
        return json.loads(Path(path).read_text())["rows"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"rows={path}: not a file of published runs ({error}); use one like {ROWS}") from None


def planned(row: dict) -> PlanEstimate:
    """Return the plan of a row's run with its trainer on its machine. Raises NotPlanned with a reason."""
    name, cluster = trainer_of(row), machine_of(row)
    if name is None or cluster is None:
        raise NotPlanned(f"no profile of {row['hardware'] if cluster is None else row['system']}")
    trainer, cluster = PROFILES[name], replace(cluster, trainer=name)
    if row["precision"] not in _PRECISIONS:
        raise NotPlanned(f"no products in {row['precision']}")
    if row["parallel"].get("interleave", 1) is None:
        raise NotPlanned("the number of virtual stages is not published")
    if not row["global_batch_sequences"] or row["model"].get("family") not in _FAMILIES:
        raise NotPlanned("model or batch is not published")
    settings = [*_model(row), *_training(row)]
    plans, problem = [], "no possible grid"
    for parallel in _parallel(row, trainer):
        try:
            config = replace(complete(compose([*settings, *parallel])), cluster=cluster)
            plans.append(_plan(row, config))
        except ConfigError as error:
            problem = str(error)
    if not plans:
        raise NotPlanned(problem)
    fitting = [plan for plan in plans if plan.memory_gib <= (cluster.memory_gib or math.inf)]
    return min(fitting, key=lambda plan: plan.step_time_s) if fitting else min(plans, key=lambda p: p.memory_gib)


def _plan(row: dict, config: Config) -> PlanEstimate:
    devices = row["gpus"]
    if config.parallel.mode == "auto":
        ranking = rank(replace(config, parallel=replace(config.parallel, mode="4d")), devices, top=1)
        ranking.check(config, devices)
        return ranking.plans[0]
    return resolve(config, devices)


def _model(row: dict) -> list[str]:
    family, sizes = _FAMILIES[row["model"]["family"]], _sizes(row["model"])
    return [f"model={family}", *(f"model.{key}={value}" for key, value in sizes.items())]


def _sizes(model: dict) -> dict[str, int]:
    """Return the settings of a row's model."""
    keys = {
        "layers": model["layers"],
        "hidden": model["hidden"],
        "heads": model["heads"],
        "vocab_size": model.get("vocab") or _LAYERS_ONLY_VOCABULARY,
        "max_positions": model["seq"],
    }
    if model["family"] not in ("gpt2", "gpt2 layers only"):
        head = model.get("head_size", 128 if "experts" in model else model["hidden"] // model["heads"])
        keys |= {"key_value_heads": model["kv_heads"], "head_size": head, "inner": model["ffn"]}
    if "experts" in model:
        keys |= {"experts": model["experts"], "experts_per_token": model["top_k"]}
    return keys


def _training(row: dict) -> list[str]:
    return [
        f"train.seq_len={row['model']['seq']}",
        f"train.batch_size={row['global_batch_sequences']}",
        f"train.precision={_PRECISIONS[row['precision']]}",
        f"train.activation_checkpointing={_CHECKPOINTING.get(row['recomputation'], 'none')}",
    ]


def _parallel(row: dict, trainer: TrainerProfile) -> Iterator[list[str]]:
    """Yield the settings of the row's grid, or of each possible grid if the row does not state it."""
    sizes, devices, batch = row["parallel"], row["gpus"], row["global_batch_sequences"]
    if "mesh" in sizes or "tensor" in sizes:
        first, second = map(int, sizes.get("mesh", f"{devices}x1").split("x"))
        yield ["parallel.mode=atp", f"parallel.d1={first}", f"parallel.d2={second}",
               f"parallel.chunks={sizes.get('chunks', 1)}", f"train.micro_batch_size={row['micro_batch']}",
               *trainer.overrides(False, False)]  # fmt: skip
        return
    if "grid" not in sizes:
        choices = [(sizes.get("tp", 1), sizes.get("pp", 1))]
    elif row["system"] == "AxoNN":
        yield ["parallel.mode=auto", "parallel.pipeline.stages=1", *trainer.overrides(True, True)]
        return
    elif row["system"] == "ZeRO-3":
        choices = [(1, 1)]
    else:
        raise NotPlanned("the sizes of the grid are not published")
    tokens = trainer.sequence_parallel or "sequence parallel" in row["recomputation"]
    for tp, pp in choices:
        shards = devices // tp // pp
        context = sizes.get("cp", 1)
        samples = batch * context // shards  # samples of a model replica
        if not samples or batch * context % shards:
            continue
        fsdp = "fsdp" in sizes or row["system"] == "ZeRO-3"
        z = _largest_z(row, shards) if fsdp else sizes.get("ep", 1)
        grid = [f"parallel.gx={tp}", f"parallel.gz={z}", f"parallel.gdata={shards // z}", f"parallel.context={context}",
                f"parallel.sequence_parallel={str(tp > 1 and tokens).lower()}",
                f"parallel.pipeline.stages={pp}"]  # fmt: skip
        chunks = sizes.get("interleave", sizes.get("vp", 1))
        if pp > 1:
            name = "interleaved_1f1b" if chunks > 1 else "1f1b"
            grid += [f"parallel.pipeline.schedule={name}", f"parallel.pipeline.chunks_per_stage={chunks}"]
        stated = row["micro_batch"]
        if pp > 1 and stated == samples:
            stated = None  # the batch of a replica: a pipeline has several microbatches
        for size in [stated] if stated else _MICRO_BATCHES:
            if samples % size == 0:
                key = f"train.micro_batch_size={size}" if pp == 1 else None
                own = trainer.overrides(fsdp, samples > size)
                yield [*grid, *own, key or f"parallel.pipeline.microbatches={samples // size}"]


def _largest_z(row: dict, devices: int) -> int:
    """Return the largest number of devices over which z can split all weights."""
    limits = [rule.extent for rule in registry.describe(compose(_model(row)).model).rules if "z" in rule.axes]
    return max(size for size in divisors(devices) if all(limit % size == 0 for limit in limits))


def summary(row: dict, plan: PlanEstimate) -> dict[str, Any]:
    """Return the parts of a row's plan that the results state."""
    trainer = PROFILES[trainer_of(row) or "gpt4d"]
    length, vocabulary = row["model"]["seq"], row["model"].get("vocab") or 0
    logits = plan.micro_batch * length / plan.config.parallel.context * vocabulary / plan.sizes.x
    return {
        "grid": plan.grid,
        "micro_batch": plan.micro_batch,
        "compute_s": plan.slowest.compute_s,
        "exposed_s": plan.slowest.exposed_s,
        "idle_s": plan.idle_s,
        "memory_gib": plan.memory_gib + trainer.logit_bytes * logits / 2**30,
    }


def mfu_table(rows: Iterable[dict]) -> list[dict]:
    """Return the ranges of the published MFU that gpt4d/planner/published.py explains.

    They are ordered by GPU and size, without ranges of fewer than three rows.
    """
    families = {name: compose([f"model={_FAMILIES[name]}"]).model for name in _DENSE}
    found = defaultdict(list)
    for row in rows:
        word = re.search(r"\b[A-Z]+\d+X?\b", row["hardware"])
        gpu = word and gpu_model(word[0])
        batch, model = row["global_batch_sequences"], row["model"]
        if not (gpu and gpu.peak_tflops and batch and row["step_s"] and row["precision"] in ("bf16", "fp16")):
            continue
        if model.get("family") not in families or model["seq"] > LONGEST or row["gpus"] < FEWEST:
            continue
        description = registry.describe(replace(families[model["family"]], **_sizes(model)))
        flops = description.training_flops(batch, model["seq"])
        mfu = flops / row["step_s"] / row["gpus"] / gpu.peak_tflops / 1e12
        above = bisect.bisect(_BILLIONS, description.num_parameters / 1e9)
        found[word[0], gpu.peak_tflops, above].append(mfu)
    return [
        {
            "gpu": gpu,
            "peak_tflops": peak,
            "billions": [*_BILLIONS[above - 1 : above + 1]],
            "mfu": [round(mfu, 3) for mfu in _middle(runs)],
            "runs": len(runs),
        }
        for (gpu, peak, above), runs in sorted(found.items())
        if len(runs) >= 3 and 0 < above < len(_BILLIONS)
    ]


def _middle(values: list[float]) -> tuple[float, float]:
    """Return the lower and upper quartile; of fewer than five values the smallest and the largest one."""
    if len(values) < 5:
        return min(values), max(values)
    lower, _, upper = statistics.quantiles(values, n=4, method="inclusive")
    return lower, upper


def mfu_text(rows: Iterable[dict]) -> str:
    """Return ``mfu_table`` as YAML, one line per range."""
    style = {"default_flow_style": True, "sort_keys": False, "width": math.inf}
    lines = (f"- {yaml.safe_dump(entry, **style)}" for entry in mfu_table(rows))
    return "# Written by python -m benchmarks published mfu=FILE\n" + "".join(lines)

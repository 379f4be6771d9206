"""Evaluation of a model on one device: gpt4d's model in lm-evaluation-harness, and the harness's own model (HFLM).

    python -m benchmarks evaluation [model=DIR] [repeats=5] [batch_size=16] [questions=50] [texts=20] [threads=1]
        [out=benchmarks/results/evaluation]

``model`` is a directory of transformers; by default a small GPT-2 of random weights is made. Both models have the same
weights, in fp32, the same batch size and the same requests, and alternate in one process. The requests are four answers
to each question, whose log-likelihoods are computed, and greedy continuations of texts of different lengths. Prints
seconds, the largest difference of a log-likelihood and the number of continuations that differ.
"""

import random
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks import report
from gpt4d.checkpoint.checkpoint_dir import Checkpoint
from gpt4d.checkpoint.importer import import_model
from gpt4d.checkpoint.trained_model import inference_plan, trained_model
from gpt4d.data import tokenizers, transformers_tokenizer
from gpt4d.evaluation.shared_model import SharedModel
from gpt4d.runtime.launch import Launch
from gpt4d.task.task import InferenceConfig

PACKAGES = ("torch", "transformers", "lm_eval")
_ANSWERS = 4  # answers to a question
_WORDS = "the union of states is a government laws and people every state have strength duty peace gold law men"


@dataclass
class Settings:
    model: str | None = None
    repeats: int = 5
    warm_up: int = 1
    batch_size: int = 16
    questions: int = 50
    texts: int = 20
    tokens: int = 32  # new tokens of each text
    threads: int = 1
    out: str = "benchmarks/results/evaluation"


def make_model(directory: Path) -> None:
    """Write a GPT-2 of random weights and GPT-2's tokenizer to ``directory``."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    GPT2LMHeadModel(GPT2Config(n_embd=512, n_layer=4, n_head=8)).save_pretrained(directory)
    tokenizer = tokenizers.gpt2()
    transformers_tokenizer.write(tokenizer, {tokenizers.FILE: tokenizer.to_str().encode()}, directory, 1024)


def requests_of(settings: Settings) -> dict[str, list[Any]]:
    """Return the requests by the name of the harness's method."""
    draw = random.Random(0)

    def text(least: int, most: int) -> str:
        return " ".join(draw.choices(_WORDS.split(), k=draw.randint(least, most)))

    questions = [text(20, 60) for _ in range(settings.questions)]
    answers = [(question, f" {text(2, 6)}") for question in questions for _ in range(_ANSWERS)]
    ends = {"until": ["\n\n\n"], "max_gen_toks": settings.tokens, "do_sample": False}
    texts = [(text(10, 60), dict(ends)) for _ in range(settings.texts)]
    return {
        "loglikelihood": [SimpleNamespace(args=arguments) for arguments in answers],
        "generate_until": [SimpleNamespace(args=arguments) for arguments in texts],
    }


def compare(settings: Settings, contenders: dict[str, Callable[[str, list[Any]], list[Any]]]) -> dict:
    """Return one row per contender and kind of request, ratios of speed, and the differences of the answers."""
    rows, ratios, answers = [], {}, {}
    for kind, requests in requests_of(settings).items():
        seconds: dict[str, list[float]] = {family: [] for family in contenders}
        for repetition in range(settings.warm_up + settings.repeats):
            for family, ask in contenders.items():
                started = time.perf_counter()
                answers[family, kind] = ask(kind, requests)
                if repetition >= settings.warm_up:
                    seconds[family].append(time.perf_counter() - started)
        of_kind = [report.row(family, kind, [{"seconds": each} for each in seconds[family]]) for family in contenders]
        ratios[f"{kind}_over_hflm"] = of_kind[1]["median_s"] / of_kind[0]["median_s"]
        rows += of_kind
    pairs = zip(*(answers[family, "loglikelihood"] for family in contenders), strict=True)
    ratios["largest_difference"] = max(abs(float(one) - float(other)) for (one, _), (other, _) in pairs)
    texts = zip(*(answers[family, "generate_until"] for family in contenders), strict=True)
    ratios["differing_texts"] = sum(one != other for one, other in texts)
    return {"rows": rows, "comparison": ratios}


def run(settings: Settings) -> Iterator[dict]:
    from lm_eval.models.huggingface import HFLM

    from gpt4d.evaluation.harness import Harness

    with tempfile.TemporaryDirectory(prefix="benchmark-") as directory:
        source, imported = Path(settings.model or f"{directory}/model"), Path(directory, "run")
        if settings.model is None:
            make_model(source)
        import_model(str(source), imported)
        theirs: Any = HFLM(pretrained=str(source), device="cpu", dtype="float32", batch_size=settings.batch_size)
        checkpoint = Checkpoint.open(imported)
        plan = inference_plan(checkpoint.meta.model, InferenceConfig(str(imported)), 1)
        with trained_model(checkpoint, plan, Launch.from_environment()) as stage:
            torch.set_num_threads(settings.threads)
            settings_of_model: Any = checkpoint.meta.model
            files = checkpoint.model_files()
            tokenizer = transformers_tokenizer.load(files, imported, settings_of_model.max_positions)
            ends = transformers_tokenizer.end_tokens(tokenizer, files)
            shared = SharedModel(stage, tokenizer, ends, settings.batch_size)
            results = compare(
                settings,
                {
                    "ours": lambda kind, asked: shared.run(lambda: getattr(Harness(shared), kind)(asked, True)) or [],
                    "HFLM": lambda kind, asked: getattr(theirs, kind)(asked, True),
                },
            )
    for row in results["rows"]:
        print(report.line(row), flush=True)
    print(results["comparison"], flush=True)
    yield {"config": asdict(settings), **results}


def plot(settings: Settings, results: dict) -> Any:
    return report.bars(results["rows"], "Evaluation on one device")

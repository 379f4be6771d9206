"""Language modeling: batches of token ids, the cross-entropy of the next token, and a continued prompt."""

import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from gpt4d.config import Config, ConfigError, DataConfig
from gpt4d.data import verification
from gpt4d.data.batch import Batch
from gpt4d.data.prepare import Corpus, corpus
from gpt4d.data.sampler import Blend, Sequences
from gpt4d.data.tokenizers import FILE, companions, end_of_text, parse
from gpt4d.data.tokens import TokenFiles
from gpt4d.model.parts import Part
from gpt4d.parallel.layers.documents import Documents
from gpt4d.parallel.stage import Stage
from gpt4d.runtime.consensus import run_on_all_ranks, run_on_rank0
from gpt4d.task.generation import continuations
from gpt4d.task.reading import ReadingTask
from gpt4d.task.task import Artifact, GenerateConfig

_PROMPT_OF_SPEECHES = "My fellow citizens,"
_PROMPT_TOKENS = 16
_FEW_TOKENS = 0.9  # share of the model's vocabulary: a smaller tokenizer is reported


def generate(config: GenerateConfig, files: Mapping[str, bytes], stage: Stage) -> str:
    """Return the continuations of prompts (gpt4d.task.registry.TaskEntry)."""
    prompts = _prompts(config)
    if FILE not in files:
        raise ConfigError(
            f"checkpoint={config.checkpoint}: it was imported without a tokenizer; import the model again with "
            "tokenizer=NAME"
        )
    tokenizer = parse(files, config.checkpoint)
    texts = continuations(
        stage,
        tokenizer,
        end_of_text(tokenizer, files),
        prompts,
        config.tokens,
        temperature=config.temperature,
        top_k=config.top_k,
        seed=config.seed,
    )
    return "\n\n".join(texts)


def _prompts(config: GenerateConfig) -> list[str]:
    if (config.prompt is None) == (config.prompts is None):
        raise ConfigError("prompt=…: set it to the text that the model continues, or prompts to a file with one a line")
    if config.prompt is not None:
        return [config.prompt]
    try:
        prompts = Path(str(config.prompts)).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"prompts={config.prompts}: {reason}; use a text file with one prompt a line") from None
    if not prompts:
        raise ConfigError(f"prompts={config.prompts}: empty; write one prompt a line")
    return prompts


def _prepare(config: DataConfig) -> tuple[list[str], list[int]]:
    found = corpus(config)
    return [str(files.directory) for files in found.files], found.weights


class LanguageModeling(ReadingTask):
    """Language modeling on the corpus of ``config.data`` (gpt4d.task.task.Task).

    Rank 0 prepares token files that are not in the cache; all ranks read them. Raises ConfigError on every rank for
    data that cannot be used.
    """

    def __init__(self, config: Config):
        self.config = config
        directories, weights = run_on_rank0(lambda: _prepare(config.data), "preparing the data")
        self._corpus = Corpus([TokenFiles(Path(directory)) for directory in directories], weights)
        self._files = self._corpus.first
        training, held_out = run_on_all_ranks(self._read, "opening the data")
        for files, sequences in zip(self._corpus.files, training, strict=True):
            if not sequences.count:
                raise ConfigError(
                    f"train.seq_len={config.train.seq_len}: a sequence takes {config.train.seq_len + 1} tokens, and "
                    f"the training text in {files.directory} has {len(sequences.tokens)}; use more text or lower it"
                )
        complete = all(sequences.count for sequences in held_out)
        super().__init__(config, self._blend(training), self._blend(held_out) if complete else None)

    def _read(self) -> tuple[list[Sequences], list[Sequences]]:
        try:
            directory = self._files.directory
            self._tokenizer_files = {FILE: (directory / FILE).read_bytes()} | companions(directory)
            self._fingerprint = self._files.fingerprint()
            return self._sequences("train", self.config.data.shuffle), self._sequences("validation", shuffle=False)
        except OSError as error:
            raise ConfigError(
                f"{error.filename}: {error.strerror} on {socket.gethostname()}; use a file system that all nodes share"
            ) from None

    def verify(self, run_dir: Path) -> None:
        verification.verify([entry for files in self._corpus.files for entry in files.entries()], run_dir)

    def _sequences(self, split: str, shuffle: bool) -> list[Sequences]:
        length, seed = self.config.train.seq_len, self.config.train.seed
        return [Sequences(files.tokens(split), length, seed, shuffle) for files in self._corpus.files]

    def _blend(self, sequences: list[Sequences]) -> Sequences | Blend:
        return sequences[0] if len(sequences) == 1 else Blend(sequences, list[float](self._corpus.weights))

    def _reads(self, stage: Stage) -> bool:
        # Stages between the first and the last one need tokens only for the ends of documents.
        return self.config.data.reset_attention or any(part.begins or part.ends for part in stage.parts.values())

    def _batch(self, rows: torch.Tensor, sample_ids: torch.Tensor, held_out: bool = False) -> Batch:
        ids = rows.to(sample_ids.device, non_blocking=True).long()
        inputs = {"ids": ids[:, :-1], "documents": self._documents(ids[:, :-1], rows[:, :-1])}
        return Batch(inputs, ids[:, 1:], sample_ids)

    def _documents(self, ids_BS: torch.Tensor, on_host: torch.Tensor) -> Documents | None:
        """Return the documents of sequences; None if attention ignores them."""
        if not self.config.data.reset_attention:
            return None
        return Documents.ending_with(self._files.end_of_text, ids_BS, on_host)

    def compute(
        self, module: nn.Module, part: Part, batch: Batch, received: Mapping[str, torch.Tensor]
    ) -> Mapping[str, torch.Tensor]:
        model: Any = module
        ids, documents = batch.inputs["ids"], batch.inputs["documents"]
        return model.compute(part, received, ids, batch.targets, batch.sample_ids, documents)

    def sample(self) -> Artifact | None:
        logging = self.config.logging
        if logging.sample_prompt == "" or not logging.sample_tokens:
            return None
        prompt = self._held_out_prompt() if logging.sample_prompt is None else logging.sample_prompt
        with self._averages.applied():
            (text,) = continuations(
                self._stage,
                self._files.tokenizer(),
                self._files.end_of_text,
                [prompt],
                logging.sample_tokens,
                self._documents,
            )
        return Artifact(f"\n{text}\n", {"text": text})

    def _held_out_prompt(self) -> str:
        """Return the beginning of the first held-out document; of the first document if no document is held out."""
        if self.config.data.source == "sotu":
            return _PROMPT_OF_SPEECHES
        files = self._files
        ids = files.tokens("validation" if files.count("validation", "tokens") else "train")[:_PROMPT_TOKENS].tolist()
        length = ids.index(files.end_of_text) if files.end_of_text in ids else len(ids)
        # The last token may end within a character, which is decoded as U+FFFD.
        return files.tokenizer().decode(ids[:length]).rstrip("\ufffd")

    def summary(self) -> str:
        def count(split: str) -> int:
            return sum(files.count(split, "tokens") for files in self._corpus.files)

        vocabulary, model = self._files.header["vocabulary"], cast(Any, self.config.model)
        text = f"{self.config.data.name}: {count('train'):,} tokens to train on, {count('validation'):,} held out"
        if vocabulary < model.vocab_size * _FEW_TOKENS:
            text += f"\nthe tokenizer has {vocabulary:,} tokens, and model.vocab_size={model.vocab_size}; lower it"
        if self.config.train.validation_batches and not self.validation_steps:
            text += "\nno validation: the held-out text is shorter than one batch"
        return text

    def identity(self) -> dict[str, str]:
        return {"tokenizer": self._fingerprint, "samples": self._corpus.fingerprint(), "data": self.config.data.name}

    def documents(self) -> dict[str, bytes]:
        return self._tokenizer_files

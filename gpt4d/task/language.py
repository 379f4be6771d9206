"""Language modeling: batches of token ids, the cross-entropy of the next token, and a continued prompt."""

import math
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from gpt4d.config import PREPARED, BlendStage, Config, ConfigError, blend_paths, blend_stages, samples_of_run
from gpt4d.data import documents, tokenizers, transformers_tokenizer
from gpt4d.data.completion import begin_of_text
from gpt4d.data.corpus import Corpus, corpus, held_out_corpus, opened, validation_sets, verify
from gpt4d.data.corpus_files import CorpusFile
from gpt4d.data.loader import Batch, Counts, Source
from gpt4d.data.preparation import Encoding, identity_of
from gpt4d.data.sampler import IGNORED, Blend, DocumentSequences, PackedSequences, Sequences
from gpt4d.data.stream import Position, Stream, open_stream
from gpt4d.data.tokenizers import FILE
from gpt4d.data.tokens import TokenFiles
from gpt4d.model.parts import Part
from gpt4d.parallel.layers.sequence import Documents, own_segments
from gpt4d.parallel.stage import Stage
from gpt4d.runtime import activity
from gpt4d.runtime.consensus import run_on_all_ranks, run_on_rank0
from gpt4d.runtime.errors import warn
from gpt4d.step import mask_replicas
from gpt4d.task.generation import continuations, continued, prompt_lines
from gpt4d.task.reading import ReadingTask
from gpt4d.task.task import Artifact, GenerateConfig, Sampling

_PROMPT_OF_SPEECHES = "My fellow citizens,"
_PROMPT_TOKENS = 16
# A model of a short run repeats frequent phrases, and continues rare tokens with nonsense.
_SAMPLING = Sampling(top_p=0.9, repetition_penalty=1.1)
_FEW_TOKENS = 0.9  # share of the model's vocabulary: a smaller tokenizer is reported


def generate(config: GenerateConfig, files: Mapping[str, bytes], stage: Stage) -> str:
    """Return the continuations of prompts (gpt4d.task.registry.TaskEntry)."""
    prompts = _prompts(config)
    tokenizer = transformers_tokenizer.load(files, config.checkpoint)
    ids = [_prompt_ids(tokenizer, prompt) for prompt in prompts]
    ends = transformers_tokenizer.end_tokens(tokenizer, files)
    ids = [each or ends[:1] for each in ids]
    new = continued(stage, ids, config.tokens, ends, sampling=config)
    texts = zip(ids, new, strict=True)
    return "\n\n".join(tokenizer.decode(before + after, skip_special_tokens=True) for before, after in texts)


def _prompt_ids(tokenizer: Any, prompt: str) -> list[int]:
    """Return the ids of a prompt as in transformers. Raises ConfigError for a prompt that has no tokens.

    Prints a warning on rank 0 for characters that are not in the vocabulary.
    """
    with tokenizers.library_errors("prompt=…: the tokenizer cannot encode it (%s); use another text"):
        prompt.encode()  # The library's error for half of a surrogate pair does not name it.
        ids = tokenizer.encode(prompt, verbose=False)
        unknown = tokenizers.unknown_counter(tokenizer.backend_tokenizer)(prompt, ids)
        if unknown and not tokenizer.encode(prompt, add_special_tokens=False, verbose=False):
            raise ValueError("none of its characters is in the vocabulary")
    if unknown and dist.get_rank() == 0:
        warn(f"{unknown} characters or words of a prompt are not in the vocabulary")
    return ids


def _prompts(config: GenerateConfig) -> list[str]:
    if (config.prompt is None) == (config.prompts is None):
        raise ConfigError("prompt=…: set it to the text that the model continues, or prompts to a file with one a line")
    if config.prompt is not None:
        return [config.prompt]
    prompts = prompt_lines(str(config.prompts))
    if not prompts:
        raise ConfigError(f"prompts={config.prompts}: empty; write one prompt a line")
    return prompts


class _Data(NamedTuple):
    """The data of a run, as rank 0 finds and prepares them."""

    files: list[tuple[str, str | None]]  # token files (``opened``); for a stream, the first held-out documents
    weights: list[list[int]]  # the weight of each of the token files in each stage of a blend
    sets: dict[str, tuple[tuple[str, str | None], str]]  # token files and split of each validation set
    identity: str | None  # identity of the text of a stream; None: the run trains on ``files``
    text: list[CorpusFile]  # the files of a stream


def _prepare(config: Config) -> _Data:
    data, train = config.data, config.train
    if data.tokenizer and data.source not in ("chat", *PREPARED):
        data = replace(data, begin_of_text=begin_of_text(config))
    identity, text = None, list[CorpusFile]()
    if data.stream:
        with activity.unlimited():  # a tokenizer may be downloaded
            identity = identity_of(data)
        text = [] if data.source == "hub" else documents.files(data)
        read = train.validation_batches * train.batch_size * train.seq_len + 1
        found = held_out_corpus(data, identity, read if data.validation_fraction else 0)
    else:
        found = corpus(data)
    sets = validation_sets(data, found).items()
    places = {name: (_place(files), split) for name, (files, split) in sets}
    return _Data([*map(_place, found.files)], found.weights, places, identity, text)


def _place(files: TokenFiles) -> tuple[str, str | None]:
    """Return the arguments of ``opened`` for token files."""
    return str(files.directory), files.location if files.by_index else None


def _has_documents(source: Source) -> bool:
    """Return whether the rows of samples include targets and documents, as for conversations."""
    return len(source.row_shape) == 2


class SourceLosses:
    """Sums of the training losses of each source of a blend since the last call of ``read``.

    The sums stay on the device, so that a step needs no communication for them.

    Args:
        blend: the training samples.
        names: the names of its sources.
        counts: returns the numbers of units. Arguments: a source and sample ids within the source.
        stage: the stage of this rank.
    """

    def __init__(self, blend: Blend, names: Sequence[str], counts: Callable[[Any, np.ndarray], Counts], stage: Stage):
        self._blend, self._names, self._counts, self._grid = blend, names, counts, stage.grid
        device = stage.weights.device
        tables = blend.firsts, blend.periods, blend.offsets, blend.choices
        self._firsts, self._periods, self._offsets, self._choices = (
            torch.from_numpy(table).to(device) for table in tables
        )
        self._indices = torch.arange(len(names), device=device)[:, None]
        self._sums = torch.zeros(len(names), dtype=torch.float64, device=device)

    def sources(self, sample_ids: torch.Tensor) -> torch.Tensor:
        """Return the index of each sample's source."""
        stages = torch.bucketize(sample_ids, self._firsts, right=True) - 1
        places = (sample_ids - self._firsts[stages]) % self._periods[stages] + self._offsets[stages]
        return self._choices[places]

    def add(self, sources_B: torch.Tensor, losses_BS: torch.Tensor) -> None:
        """Add the losses of a microbatch's units, given the source of each sample."""
        losses_B = losses_BS.sum(1, dtype=torch.float64)
        self._sums += torch.where(sources_B == self._indices, losses_B, 0).sum(1)

    def read(self, sample_ids: np.ndarray) -> dict[str, float | None]:
        """Return the mean loss per unit of each source over the samples since the last call, and start new sums.

        ``sample_ids``: these samples. A source without a sample among them has None. All ranks call this together.
        """
        sums = self._grid.world.all_reduce(mask_replicas(self._sums, self._grid)).tolist()
        self._sums.zero_()
        parts = zip(self._blend.sources, self._blend.by_source(sample_ids), strict=True)
        counts = [self._counts(source, source_ids).trained if len(source_ids) else 0 for source, source_ids in parts]
        means = (total / count if count else None for total, count in zip(sums, counts, strict=True))
        return dict(zip(self._names, means, strict=True))


class LanguageModeling(ReadingTask):
    """Language modeling on the corpus of ``config.data`` (gpt4d.task.task.Task).

    Conversations are packed into sequences, and only the tokens of their loss mask are counted.

    Rank 0 prepares token files that are not in the cache; all ranks read them. Raises ConfigError on every rank for
    data that cannot be used.
    """

    def __init__(self, config: Config):
        self.config = config
        self._data = data = _Data(*run_on_rank0(lambda: _prepare(config), "preparing the data"))
        self._corpus = Corpus([opened(*place) for place in data.files], data.weights)
        self._set_files = {name: (opened(*place), split) for name, (place, split) in data.sets.items()}
        stages = blend_stages(config.data.blend) if config.data.source == "blend" else [BlendStage(0, {})]
        length = samples_of_run(config.train)
        self._firsts = [math.ceil(Fraction(str(stage.begin)) * length) for stage in stages]  # first sample of a stage
        self._files = self._corpus.first
        # With Megatron's files, all samples have the documents of the index: rows of a blend have one shape.
        self._by_index = config.data.reset_attention and any(files.by_index for files in self._corpus.files)
        if self._masked and config.train.cuda_graphs:  # the settings of data=tokens do not show it
            raise ConfigError(
                f"train.cuda_graphs=true: {self._files.directory} has conversations, which give attention and loss "
                "other shapes and divisors in each batch; leave it out"
            )
        training, held_out, further = run_on_all_ranks(self._read, "opening the data")
        for files, sequences in zip(self._corpus.files, training, strict=True):
            if not sequences.count:
                used = f"train.seq_len={config.train.seq_len}: a sequence takes {config.train.seq_len + 1} tokens, and "
                raise ConfigError(
                    f"{used}every conversation in {files.location} has more; raise it"
                    if self._masked
                    else f"{used}the training text in {files.location} has {len(sequences.tokens)}; use more text or "
                    "lower it"
                )
        if not config.data.skip_long:
            self._check_lengths(training, held_out, further)
        self._packed = [*training, *held_out] if self._masked else []
        self._check_sets(further)
        complete = all(sequences.count for sequences in held_out)
        training_source = self._blend(training, self._corpus.weights, self._firsts)
        held_out_source = self._blend(held_out, self._corpus.weights[-1:], [0]) if complete else None
        super().__init__(config, training_source, held_out_source, further)

    @property
    def _masked(self) -> bool:
        """Whether the corpus consists of conversations, with a mask of the tokens that have a loss."""
        return self._files.masked

    def _read(self) -> tuple[list[Any], list[Any], dict[str, Any]]:
        try:
            directory = self._files.directory
            self._fingerprint = self._files.fingerprint()  # empty without a tokenizer
            self._tokenizer_files, self._begin = dict[str, bytes](), self._files.first_tokens
            if self._fingerprint:
                self._tokenizer_files = tokenizers.with_companions(directory / FILE)
            if self._masked:  # prompts without a template begin as the texts of the checkpoint before
                chosen = begin_of_text(self.config)
                tokenizer = self._files.tokenizer()
                self._begin = tokenizers.chosen_first_tokens(chosen, tokenizer, self._tokenizer_files)
            training, held_out = (
                [self._sequences(files, split) for files in self._corpus.files] for split in ("train", "validation")
            )
            if self._data.identity is not None:
                training = [self._stream()]
            sets = {name: self._sequences(files, split) for name, (files, split) in self._set_files.items()}
            return training, held_out, sets
        except OSError as error:
            raise ConfigError(
                f"{error.filename}: {error.strerror} on {socket.gethostname()}; use a file system that all nodes share"
            ) from None

    def _stream(self) -> Stream:
        data, train, header = self.config.data, self.config.train, self._files.header
        text = [CorpusFile(*file) for file in self._data.text]  # a list from rank 0
        tokenizer = self._files.directory / FILE
        end, fraction = self._files.end_of_text, data.validation_fraction
        encoding = Encoding(tokenizer, end, header["dtype"], fraction, first=self._begin)
        return open_stream(data, text, encoding, train.seq_len, train.seed)

    def position(self, sample: int) -> dict[str, int]:
        return self._training.position(sample)._asdict() if isinstance(self._training, Stream) else {}

    def seek(self, sample: int, position: Mapping[str, int]) -> None:
        if isinstance(self._training, Stream):
            self._training.seek(sample, Position(**position))

    def verify(self, run_dir: Path) -> None:
        read = [*self._corpus.files, *(files for files, _ in self._set_files.values())]
        verify([*dict.fromkeys(entry for files in read for entry in files.entries())], run_dir)

    def _sequences(self, files: TokenFiles, split: str) -> Any:
        """Return the sequences of a split, in the order of the files unless the run trains on them."""
        train, training = self.config.train, split == "train"
        order = train.seq_len, train.seed, training and self.config.data.shuffle
        if files.masked:  # empty sequences complete the last batch of a validation set
            return PackedSequences(files, split, *order, 1 if training else train.batch_size)
        if self._by_index or (self.config.data.reset_attention and files.by_index):
            return DocumentSequences(files.tokens(split), files.document_ends(split), *order)
        return Sequences(files.tokens(split), *order)

    def _check_sets(self, sets: Mapping[str, Any]) -> None:
        """Raise ConfigError for a validation set that is shorter than one batch."""
        train = self.config.train
        for name, sequences in sets.items():
            given = f"data.validation.{name}={self.config.data.validation[name]}"
            if isinstance(sequences, PackedSequences) and not sequences.count:
                raise ConfigError(
                    f"{given}: every conversation has more than train.seq_len={train.seq_len} + 1 tokens; raise it, or "
                    "use shorter conversations"
                )
            if sequences.count < train.batch_size:
                raise ConfigError(
                    f"{given}: {len(sequences.tokens):,} tokens are less than a batch of {train.batch_size} sequences "
                    f"of {train.seq_len} tokens; use more text, or lower train.batch_size or train.seq_len"
                )

    def _check_lengths(self, training: list[Any], held_out: list[Any], sets: Mapping[str, Any]) -> None:
        """Raise ConfigError if a conversation exceeds a sequence, or if the data are no conversations."""
        if not self._masked:
            raise ConfigError("data.skip_long=false: the data have no conversations; leave it out")
        used = [("train", files, packed) for files, packed in zip(self._corpus.files, training, strict=True)]
        used += [("validation", files, packed) for files, packed in zip(self._corpus.files, held_out, strict=True)]
        used += [(split, files, sets[name]) for name, (files, split) in self._set_files.items() if files.masked]
        for split, files, packed in used:
            if len(packed.long):
                number = int(packed.long[0])
                length = packed.ends[number] - packed.starts[number]
                raise ConfigError(
                    f"train.seq_len={self.config.train.seq_len}: conversation {number} of {split} in "
                    f"{files.directory} has {length:,} tokens, more than a sequence and its last target; raise it, "
                    "or set data.skip_long=true"
                )

    def _counts(self, source: Any, sample_ids: np.ndarray) -> Counts:
        return source.counts(sample_ids) if _has_documents(source) else super()._counts(source, sample_ids)

    def _text_bytes(self, source: Source, sample_ids: np.ndarray) -> int | None:
        if not self._fingerprint:
            return None
        rows = source.rows(sample_ids)
        targets = rows[:, 1][rows[:, 1] != IGNORED] if _has_documents(source) else rows[:, 1:]
        return int(self._bytes_of_tokens[targets].sum())

    @cached_property
    def _bytes_of_tokens(self) -> np.ndarray:
        return tokenizers.bytes_of_tokens(self._files.tokenizer(), self._files.end_of_text)

    def connect(self, stage: Stage, micro_batch_size: int) -> None:
        super().connect(stage, micro_batch_size)
        self._source_losses: SourceLosses | None = None
        if isinstance(self._training, Blend):
            paths = blend_paths(self.config.data.blend)
            names = [Path(path).name for path in paths]
            names = names if len({*names}) == len(names) else paths
            self._source_losses = SourceLosses(self._training, names, self._counts, stage)

    def training_values(self, first_sample: int, stop: int) -> dict[str, Any]:
        if self._source_losses is None:
            return {}
        return {"sources": self._source_losses.read(np.arange(first_sample, stop))}

    def _blend(self, sequences: list[Any], weights: list[list[int]], firsts: list[int]) -> Any:
        return sequences[0] if len(sequences) == 1 else Blend(sequences, weights, firsts)

    def _reads(self, stage: Stage, source: Source) -> bool:
        # Stages between the first and the last one need tokens only for the ends of documents.
        return (
            _has_documents(source)
            or self.config.data.reset_attention
            or any(part.begins or part.ends for part in stage.parts.values())
        )

    def _batch(self, rows: torch.Tensor, sample_ids: torch.Tensor, held_out: bool = False) -> Batch:
        ids = rows.to(sample_ids.device, non_blocking=True).long()
        sources = self._source_losses.sources(sample_ids) if self._source_losses and not held_out else None
        documents: Documents | None
        if masked := rows.dim() == 3:
            inputs_BS, targets_BS, documents_BS = ids.unbind(1)
            documents = Documents.of_indices(documents_BS, rows[:, 2])
        else:
            inputs_BS, targets_BS = ids[:, :-1], ids[:, 1:]
            documents = self._documents(inputs_BS, rows[:, :-1])
        context = self._stage.grid.context
        if context.size > 1:
            inputs_BS, targets_BS = (
                own_segments(part, context.size, context.index) for part in (inputs_BS, targets_BS)
            )
        return Batch({"ids": inputs_BS, "documents": documents}, targets_BS, sample_ids, masked, sources)

    def _documents(self, ids_BS: torch.Tensor, on_host: torch.Tensor) -> Documents | None:
        """Return the documents of sequences; None if attention ignores them."""
        if self._masked or not self.config.data.reset_attention:  # a prompt and its continuation are one conversation
            return None
        return Documents.ending_with(self._files.end_of_text, ids_BS, on_host)

    def compute(
        self, module: nn.Module, part: Part, batch: Batch, received: Mapping[str, torch.Tensor]
    ) -> Mapping[str, torch.Tensor]:
        model: Any = module
        ids, documents, by_source = batch.inputs["ids"], batch.inputs["documents"], batch.sources is not None
        produced = model.spec.compute(
            model, part, received, ids, batch.targets, batch.sample_ids, documents, batch.masked, by_source
        )
        losses_BS = produced.pop("token_losses", None)
        if losses_BS is not None and batch.sources is not None and self._source_losses:
            self._source_losses.add(batch.sources, losses_BS)
        return produced

    def sample(self) -> Artifact | None:
        logging = self.config.logging
        if logging.sample_prompt == "" or not logging.sample_tokens or not self._fingerprint:
            return None
        if logging.sample_prompt is None and self._data.identity and not self._files.count("validation", "tokens"):
            return None  # a stream has no other text that a prompt can be taken from
        prompt = self._held_out_prompt() if logging.sample_prompt is None else logging.sample_prompt
        directory = self._files.directory
        tokenizer = tokenizers.parse(
            tokenizers.with_first_tokens(self._tokenizer_files, self._begin, directory), directory
        )
        with self.averaged():
            (text,) = continuations(
                self._stage,
                tokenizer,
                self._files.end_of_text,
                [prompt],
                logging.sample_tokens,
                self._documents,
                _SAMPLING,
                # The chat template has rendered the first token of a held-out conversation.
                begins=not (self._masked and logging.sample_prompt is None),
            )
        return Artifact(f"\n{text}\n", {"text": text})

    def _held_out_prompt(self) -> str:
        """Return the beginning of the first held-out document; of the first document if no document is held out."""
        if self.config.data.source == "sotu":
            return _PROMPT_OF_SPEECHES
        files = self._files
        split = "validation" if files.count("validation", "tokens") else "train"
        if self._masked:  # the first conversation up to the first answer
            length = int(files.mask(split)[: files.document_ends(split)[0]].argmax())
            return files.tokenizer().decode(files.tokens(split)[:length].tolist(), skip_special_tokens=False)
        ids = files.tokens(split)[:_PROMPT_TOKENS].tolist()
        length = ids.index(files.end_of_text) if files.end_of_text in ids else len(ids)
        # The last token may end within a character, which is decoded as U+FFFD.
        return files.tokenizer().decode(ids[:length]).rstrip("\ufffd")

    def summary(self) -> str:
        def count(split: str, kind: str = "tokens") -> int:
            return sum(files.count(split, kind) for files in self._corpus.files)

        vocabulary, model = self._files.header["vocabulary"], cast(Any, self.config.model)
        text = f"{self.config.data.name}: {count('train'):,} tokens to train on, {count('validation'):,} held out"
        if self._data.identity:
            text = (
                f"{self.config.data.name}: tokenized while training, {count('validation'):,} held-out tokens are read"
            )
        if self._masked:
            text += f"; {count('train', 'trained'):,} and {count('validation', 'trained'):,} of them have a loss"
            text += f"\n{self._packing()}"
        if not self._fingerprint:
            text += f"; the largest token is {vocabulary - 1:,}"
        elif vocabulary < model.vocab_size * _FEW_TOKENS:
            text += f"\nthe tokenizer has {vocabulary:,} tokens, and model.vocab_size={model.vocab_size}; lower it"
        if self._fingerprint:
            text += "".join(f"\n{remark}" for remark in self._files.remarks())
        for name, (files, _) in self._set_files.items():
            found: Any = self._sets[name]
            used = self.validation[name].steps * self.config.train.batch_size
            text += f"\nvalidation set {name}: {used:,} of {found.count:,} sequences are evaluated"
            if files.masked and len(found.long):
                text += f"; {len(found.long):,} conversations are too long and left out"
        if self.config.train.validation_batches and not self._validates_held_out:
            text += "\nno validation on held-out text: it is shorter than one batch"
        return text

    def _packing(self) -> str:
        """Return how conversations fill sequences, and how many are left out."""
        capacity = self.config.train.seq_len + 1
        used, long, sequences = (
            sum(values)
            for values in zip(*((len(p.documents), len(p.long), p.packed) for p in self._packed), strict=True)
        )
        filled = sum(packed.filled for packed in self._packed) / (sequences * capacity)
        text = f"{used:,} conversations fill {filled:.0%} of {sequences:,} sequences"
        if long:
            text += f"; {long:,} of more than {capacity:,} tokens are left out, raise train.seq_len to use them"
        return text

    def identity(self) -> dict[str, str]:
        tokenizer = {"tokenizer": self._fingerprint} if self._fingerprint else {}
        samples = self._data.identity or self._corpus.fingerprint(self._firsts)
        begin = {tokenizers.BEGIN: " ".join(map(str, self._begin))} if self._begin else {}
        return {**tokenizer, **begin, "samples": samples, "data": self.config.data.name}

    def documents(self) -> dict[str, bytes]:
        return self._tokenizer_files

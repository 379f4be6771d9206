"""The tensors of a model of transformers or diffusers. Quantized weights are rejected."""

import json
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from gpt4d.config import ConfigError, ModelConfig
from gpt4d.model.family import HuggingFaceAdapter

_DTYPES = ("F64", "F32", "BF16", "F16")
_QUANTIZED = re.compile(r"_scale|\.SCB$|\.q(weight|zeros)$|\.absmax$|\.quant_")
_UNQUANTIZED = "use the model that it was quantized from"


class SourceWeights:
    """The tensors of a source directory by name. Raises ConfigError for tensors that cannot be imported.

    Args:
        directory: contains ``*.safetensors`` and, for several files, their index.
        values: its ``config.json``.
        model: gpt4d's settings of the model.
        adapter: the adapter that names its tensors.
        names: all parameters of gpt4d's model.
    """

    def __init__(
        self,
        directory: Path,
        values: dict[str, Any],
        model: ModelConfig,
        adapter: HuggingFaceAdapter,
        names: Collection[str],
    ):
        self.directory, self.base = directory, adapter.BASE
        if values.get("quantization_config") or values.get("compression_config"):
            raise ConfigError(f"{directory}: config.json has a quantization_config; {_UNQUANTIZED}")
        self._files = _open(directory, f"{adapter.FILE}.safetensors.index.json")
        expected = {self._stored_name(key) for name in names for key in adapter.names(name, model)}
        copies = {self._stored_name(key): self._stored_name(of) for key, of in adapter.copies(model).items()}
        for key in sorted(self._files.keys() - expected - copies.keys()):
            self._check_unknown(key, adapter)
        for key in sorted(self._files.keys() & {*expected, *copies}):
            if (dtype := self._files[key].get_slice(key).get_dtype()) not in _DTYPES:
                raise ConfigError(
                    f"{directory}: {key} has dtype {dtype}; use a model whose weights are {', '.join(_DTYPES[:-1])} or "
                    f"{_DTYPES[-1]}, which are not quantized"
                )
        for key, of in copies.items():
            if {key, of} <= self._files.keys() and not torch.equal(self._read(key), self._read(of)):
                raise ConfigError(
                    f"{directory}: {key} differs from {of}, but config.json ties them; set tie_word_embeddings in "
                    "config.json to its value in the training"
                )

    def read(self, key: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Return a tensor in float32. Raises ConfigError if it is missing, has another shape or non-finite values."""
        key = self._stored_name(key)
        actual = self._files[key].get_slice(key).get_shape() if key in self._files else None
        if actual != list(shape):
            problem = "missing" if actual is None else actual
            raise ConfigError(f"{self.directory}: {key} must be of shape {list(shape)}, but is {problem}")
        tensor = self._read(key).float()
        if not tensor.isfinite().all():
            raise ConfigError(f"{self.directory}: {key} has values that are not finite in float32; use another copy")
        return tensor

    def _read(self, key: str) -> torch.Tensor:
        return self._files[key].get_tensor(key)

    def _stored_name(self, key: str) -> str:
        """Return the name of a tensor in the files. A base model that was saved without its head omits ``BASE``."""
        short = key.removeprefix(self.base)
        return short if key not in self._files and short in self._files else key

    def _check_unknown(self, key: str, adapter: HuggingFaceAdapter) -> None:
        if _QUANTIZED.search(key):
            raise ConfigError(f"{self.directory}: {key} belongs to quantized weights; {_UNQUANTIZED}")
        if not re.fullmatch(adapter.BUFFERS, key if key.startswith(self.base) else self.base + key):
            raise ConfigError(
                f"{self.directory}: {key} is not a tensor of a model with this config.json; use a model without it"
            )


def _open(directory: Path, index: str) -> dict[str, Any]:
    """Return the opened file of each tensor. If the directory has an index, the index names the files."""
    if (directory / index).exists():
        listed = _read_index(directory / index)
        opened = {name: _open_file(directory / name) for name in sorted({*listed.values()})}
        stored = {name: {*file.keys()} for name, file in opened.items()}
        for key, name in listed.items():
            if key not in stored[name]:
                raise ConfigError(f"{directory / name}: lacks {key}, which {index} places there; download it again")
        return {key: opened[name] for key, name in listed.items()}
    paths = sorted(directory.glob("*.safetensors"))
    if not paths:
        raise ConfigError(f"{directory}: no *.safetensors; save the model again with a recent transformers")
    found: dict[str, tuple[Path, Any]] = {}
    for path in paths:
        file = _open_file(path)
        for key in file.keys():  # noqa: SIM118 – not a dict
            if key in found:
                raise ConfigError(f"{directory}: {found[key][0].name} and {path.name} both have {key}; remove one file")
            found[key] = path, file
    return {key: file for key, (_, file) in found.items()}


def _open_file(path: Path) -> Any:
    if not path.is_file():  # Opening a pipe blocks.
        raise ConfigError(f"{path}: missing, or not a regular file; download it again")
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{path}: damaged ({error}); download it again") from None


def _read_index(path: Path) -> dict[str, str]:
    """Return the file name of each tensor."""
    try:
        weight_map = json.loads(path.read_bytes())["weight_map"]
        for key, name in weight_map.items():
            if not isinstance(name, str) or Path(name).name != name:
                raise ValueError(f"{name!r} of {key} is not a file name in this directory")
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{path}: not a readable index ({error}); download it again") from None
    return weight_map

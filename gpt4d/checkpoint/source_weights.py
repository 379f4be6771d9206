"""The tensors of a model of transformers or diffusers, and of adapters of peft. Quantized weights are rejected."""

import re
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from gpt4d.checkpoint.model_directory import read_json
from gpt4d.config import ConfigError, ModelConfig
from gpt4d.model.family import HuggingFaceAdapter

_DTYPES = ("F64", "F32", "BF16", "F16")
_QUANTIZED = re.compile(r"_scale|\.SCB$|\.q(weight|zeros)$|\.absmax$|\.quant_")
_UNQUANTIZED = "use the model that it was quantized from"


class TensorFiles:
    """The tensors of safetensors files by name.

    Args:
        source: the beginning of all messages, such as ``adapter=DIR``.
        paths: the files. Raises ConfigError if one cannot be opened, or if two of them have a tensor of one name.
    """

    def __init__(self, source: str, paths: Iterable[Path]):
        self.source, self._files = source, dict[str, Any]()
        found: dict[str, Path] = {}
        for path in paths:
            file = _open_file(path)
            for key in file.keys():  # noqa: SIM118 – not a dict
                if key in found:
                    raise ConfigError(f"{source}: {found[key].name} and {path.name} both have {key}; remove one file")
                found[key], self._files[key] = path, file

    @property
    def names(self) -> Collection[str]:
        return self._files.keys()

    def check_dtypes(self, names: Iterable[str]) -> None:
        """Raise ConfigError unless all these tensors have floating-point dtypes of 16 bits or more."""
        for name in sorted(names):
            if (dtype := self._files[name].get_slice(name).get_dtype()) not in _DTYPES:
                raise ConfigError(
                    f"{self.source}: {name} has dtype {dtype}; use a model whose weights are {', '.join(_DTYPES[:-1])} "
                    f"or {_DTYPES[-1]}, which are not quantized"
                )

    def equal(self, *names: str) -> bool:
        """Return whether two tensors are equal."""
        first, second = (self._files[name].get_tensor(name) for name in names)
        return torch.equal(first, second)

    def read(self, name: str, shape: Iterable[int]) -> torch.Tensor:
        """Return a tensor in float32. Raises ConfigError if it is missing, has another shape or non-finite values."""
        actual = self._files[name].get_slice(name).get_shape() if name in self._files else None
        if actual != [*shape]:
            problem = "missing" if actual is None else actual
            raise ConfigError(f"{self.source}: {name} must be of shape {[*shape]}, but is {problem}")
        tensor = self._files[name].get_tensor(name).float()
        if not tensor.isfinite().all():
            raise ConfigError(f"{self.source}: {name} has values that are not finite in float32; use another copy")
        return tensor


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
        self._files = TensorFiles(str(directory), _paths(directory, f"{adapter.FILE}.safetensors"))
        expected = {self._stored_name(key) for name in names for key in adapter.names(name, model)}
        copies = {self._stored_name(key): self._stored_name(of) for key, of in adapter.copies(model).items()}
        for key in sorted({*self._files.names} - expected - copies.keys()):
            self._check_unknown(key, adapter)
        self._files.check_dtypes({*self._files.names} & {*expected, *copies})
        for key, of in copies.items():
            if {key, of} <= {*self._files.names} and not self._files.equal(key, of):
                raise ConfigError(
                    f"{directory}: {key} differs from {of}, but config.json ties them; set tie_word_embeddings in "
                    "config.json to its value in the training"
                )

    def read(self, key: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Return a tensor in float32 (``TensorFiles.read``)."""
        return self._files.read(self._stored_name(key), shape)

    def _stored_name(self, key: str) -> str:
        """Return the name of a tensor in the files. A base model that was saved without its head omits ``BASE``."""
        short = key.removeprefix(self.base)
        return short if key not in self._files.names and short in self._files.names else key

    def _check_unknown(self, key: str, adapter: HuggingFaceAdapter) -> None:
        if _QUANTIZED.search(key):
            raise ConfigError(f"{self.directory}: {key} belongs to quantized weights; {_UNQUANTIZED}")
        if not re.fullmatch(adapter.BUFFERS, key if key.startswith(self.base) else self.base + key):
            raise ConfigError(
                f"{self.directory}: {key} is not a tensor of a model with this config.json; use a model without it"
            )


def _paths(directory: Path, name: str) -> list[Path]:
    """Return the files of a model: ``name``, or the files in its index. Raises ConfigError if both exist and differ.

    transformers prefers the file and diffusers prefers the index, so one of them may be left over from another model.
    """
    whole, index = directory / name, directory / f"{name}.index.json"
    if not index.exists():
        if not whole.exists():
            raise ConfigError(f"{directory}: no {name}, and no index; save the model again with a recent library")
        return [whole]
    listed = _read_index(index)
    paths = [directory / file for file in sorted({*listed.values()})]
    if whole.exists() and paths != [whole]:
        raise ConfigError(
            f"{directory}: {name} and {index.name}, which lists other files, are two copies of the weights; remove one"
        )
    for path in paths:
        stored = {*_open_file(path).keys()}
        if missing := [key for key, file in listed.items() if file == path.name and key not in stored]:
            raise ConfigError(f"{path}: lacks {missing[0]}, which {index.name} places there; download it again")
    return paths


def _open_file(path: Path) -> Any:
    if not path.is_file():  # Opening a pipe blocks.
        raise ConfigError(f"{path}: missing, or not a regular file; download it again")
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{path}: damaged ({error}); download it again") from None


def _read_index(path: Path) -> dict[str, str]:
    """Return the file name of each tensor."""
    weight_map = read_json(str(path.parent), path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ConfigError(f"{path}: not a readable index, because it has no weight_map; download it again")
    for key, name in weight_map.items():
        if not isinstance(name, str) or Path(name).name != name:
            raise ConfigError(f"{path}: {name!r} of {key} is not a file name in this directory; download it again")
    return weight_map

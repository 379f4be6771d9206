"""Shared code of the families' adapters: reading and checks of a ``config.json``, and a usage example."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from gpt4d.config import ConfigError
from gpt4d.config.fields import LARGEST_COUNT, LARGEST_SIZE
from gpt4d.runtime.errors import one_line

# Usage example of a text model for its model card. PATH stands for the model's directory.
TEXT_USAGE = """from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("PATH")
tokenizer = AutoTokenizer.from_pretrained("PATH")
ids = model.generate(**tokenizer("Once upon a time", return_tensors="pt"), max_new_tokens=50)
print(tokenizer.decode(ids[0], skip_special_tokens=True))
"""


# Settings that transformers reads for each kind of model, although its configurations do not declare them.
_EVERY_FAMILY: dict[str, tuple] = {
    "is_causal": (True,),
    "per_layer_config": (None,),
    "attribute_map": (None,),
    "configuration_files": (None,),
    "transformers_weights": (None,),
    "fusion_config": (None,),
}


def transformers_settings(source: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return all settings of a ``config.json`` as transformers reads them.

    The library supplies the values of absent keys, and chooses between an older and a newer key for one setting.
    Raises ConfigError for values that it rejects.
    """
    from transformers import CONFIG_MAPPING, logging

    check_supported(source, values, _EVERY_FAMILY)
    for key in {"num_hidden_layers", "n_layer"} & values.keys():  # The library makes a list of the layers.
        check_sizes(source, {key: values[key]}, LARGEST_COUNT)
    given = {key: value for key, value in values.items() if key != "num_labels"}  # nor a list of the classes
    verbosity = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)  # It prints the complete configuration.
    try:
        config = CONFIG_MAPPING[values["model_type"]].from_dict(copy.deepcopy(given))
        if getattr(config, "rope_parameters", None):
            config.standardize_rope_params()  # as the library does once more before it computes the frequencies
        return config.to_dict()
    except Exception as error:  # The type depends on the value.
        raise ConfigError(
            f"{source}: config.json has an invalid value ({one_line(error)}); correct that file"
        ) from None
    finally:
        logging.set_verbosity(verbosity)


def unsupported(source: str, key: str, value: object, supported: object, file: str = "config.json") -> ConfigError:
    """Return the error for a setting that gpt4d computes differently."""
    return ConfigError(f"{source}: {key}={value!r:.80} in {file} is not supported; use a model with {key}={supported}")


def check_supported(source: str, values: Mapping, choices: Mapping[str, Sequence], file: str = "config.json") -> None:
    """Raise ConfigError unless each of some settings is missing or has one of its ``choices``."""
    for key, supported in choices.items():
        if values.get(key, supported[0]) not in supported:
            raise unsupported(source, key, values[key], repr(supported[0]), file)


def check_sizes(source: str, sizes: Mapping[str, object], at_most: int = LARGEST_SIZE) -> None:
    """Raise ConfigError unless all sizes are integers from 1 to ``at_most``."""
    for key, size in sizes.items():
        if type(size) is not int or not 1 <= size <= at_most:
            raise ConfigError(
                f"{source}: {key}={size!r:.80} in config.json is not a size; use a number from 1 to {at_most:,}"
            )

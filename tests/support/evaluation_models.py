"""Random models of transformers whose evaluation is compared, and the runs that they are imported into."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from tokenizers import processors

from gpt4d.checkpoint.checkpoint_dir import Checkpoint
from gpt4d.checkpoint.importer import import_model
from gpt4d.checkpoint.trained_model import inference_plan, load_stage
from gpt4d.data import tokenizers, transformers_tokenizer
from gpt4d.evaluation.shared_model import SharedModel
from gpt4d.task.task import InferenceConfig

TEXT = "The union of the states is a government of laws, and the people of every state are its strength. "


def random_model(family: str) -> torch.nn.Module:
    """Return a random model of transformers whose tokens depend on all tokens before them."""
    from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

    torch.manual_seed(0)
    common = {"vocab_size": 300, "bos_token_id": 0, "eos_token_id": 0}
    config = (
        GPT2Config(n_positions=48, n_embd=32, n_layer=2, n_head=4, **common)
        if family == "gpt2"
        else LlamaConfig(
            max_position_embeddings=48, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, intermediate_size=48, tie_word_embeddings=True, **common,
        )
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name and "ln_" not in name:
                parameter.mul_(8)
    return model


def imported(family: str, directory: Path, first: str | None = None) -> tuple[Path, Path]:
    """Return the directory of a random model with a tokenizer, and the run that it was imported into.

    ``first``: a token that the tokenizer puts before a text, and a template that renders it. Its tokenizer.json has
    settings that cut and fill texts.
    """
    source, run = directory / "source", directory / "run"
    random_model(family).save_pretrained(source)
    tokenizer, files = tokenizers.train([TEXT], 299), dict[str, bytes]()
    if first:
        tokenizer.add_special_tokens([first])
        ids = [(first, tokenizer.token_to_id(first))]
        tokenizer.post_processor = processors.TemplateProcessing([first, "$A"], None, ids)
        tokenizer.enable_truncation(3)
        tokenizer.enable_padding(length=20, pad_token=tokenizers.END_OF_TEXT)
        files[tokenizers.TEMPLATE] = b"{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"
    files[tokenizers.FILE] = tokenizer.to_str().encode()
    transformers_tokenizer.write(tokenizer, files, source, 48)
    import_model(str(source), run)
    return source, run


@contextmanager
def shared_model(run: Path, batch_size: int = 3, **settings) -> Iterator[SharedModel]:
    """Yield the model of a run or a checkpoint on this rank, as gpt4d evaluate loads it."""
    checkpoint = Checkpoint.open(run)
    plan = inference_plan(checkpoint.meta.model, InferenceConfig(str(run), **settings), dist.get_world_size())
    stage = load_stage(checkpoint, plan, dist.get_rank(), torch.device("cpu"), ranks_per_host=1)
    files = checkpoint.model_files()
    tokenizer = transformers_tokenizer.load(files, run, checkpoint.meta.model.max_positions)
    yield SharedModel(stage, tokenizer, transformers_tokenizer.end_tokens(tokenizer, files), batch_size)
    if stage.exchange:
        stage.exchange.close()

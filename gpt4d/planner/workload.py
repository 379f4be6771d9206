"""The size of a training run on one device: bytes of its state, of an activation, and its microbatches."""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace

from gpt4d.config import Config, GridSizes, OptimConfig, batch_sizes, divisors, grid_problem
from gpt4d.config.checks import Divisibility, chunk_problem
from gpt4d.config.pipeline import SPLIT_BACKWARDS
from gpt4d.model import registry
from gpt4d.model.description import Description
from gpt4d.model.probe import Product
from gpt4d.optim.matrices import num_states, rows_of
from gpt4d.parallel.layout import ParameterSpec
from gpt4d.parallel.symbolic.stage import MASTER_BYTES
from gpt4d.planner.device import sent_bytes


def grids(devices: int) -> Iterator[GridSizes]:
    """Yield every (x, y, z, data) whose product is ``devices``."""
    for x in divisors(devices):
        for y in divisors(devices // x):
            for z in divisors(devices // x // y):
                yield GridSizes(x, y, z, devices // x // y // z)


def training_state(
    description: Description, sizes: GridSizes, optim: OptimConfig, frozen_bytes: int = MASTER_BYTES
) -> dict[str, int]:
    """Return bytes on a device: persistent ``weights`` and ``optimizer`` states, and ``gradients`` of each step.

    ``frozen_bytes``: bytes of an element of a frozen weight, which has the compute dtype.
    """
    counts = description.parameter_counts
    trained = [(spec, count) for spec, count in counts if not spec.frozen]
    gradients = sum(count * spec.local_elements(sizes) for spec, count in trained) * MASTER_BYTES
    frozen = sum(count * spec.local_elements(sizes) for spec, count in counts if spec.frozen) * frozen_bytes
    states = sum(count * _state_elements(spec, sizes, optim) for spec, count in counts)
    states -= sum(_state_elements(spec, sizes, optim) for spec in description.copied.values())  # another stage has them
    return {"weights": gradients + frozen, "gradients": gradients, "optimizer": states * MASTER_BYTES}


def _state_elements(spec: ParameterSpec, sizes: GridSizes, optim: OptimConfig) -> int:
    """Return the number of elements of a parameter's optimizer states on a device. Data splits Muon's momentum."""
    count = num_states(spec, optim)
    if count == 1:
        return rows_of(spec.over_data(sizes) if optim.shard_states else spec, sizes).local_elements(sizes)
    return count * spec.optimized_elements(sizes, optim.shard_states)


class Descriptions:
    """Cache of the descriptions that a search needs. Most grids, options and choices share a description."""

    def __init__(self) -> None:
        self._known: dict[tuple, Description] = {}

    def of(self, config: Config, grids: Collection[GridSizes] = ()) -> Description:
        """Return ``registry.describe_run`` of these arguments: the same object for equal descriptions."""
        # The settings that describe_run reads.
        train = config.train
        settings = config.parallel.replicated_layers, train.loss_chunks, train.precision == "fp8"
        key = repr(config.model.on_grids(grids)), *settings
        if key not in self._known:
            self._known[key] = registry.describe_run(config, grids)
        return self._known[key]


def step_flops(config: Config, description: Description) -> float:
    """Return the FLOPs that all devices compute in a step, including recomputed blocks."""
    train = config.train
    if train.activation_checkpointing == "full":
        return description.hardware_flops(train.batch_size, train.seq_len)
    return description.training_flops(train.batch_size, train.seq_len)


def products(description: Description, length: int) -> list[tuple[Product, int]]:
    """Return the products of blocks: the linear layers or the convolutions, each with its number of blocks."""
    blocks = Counter(block.kind for block in description.blocks)
    first = {block.kind: block for block in reversed(description.blocks)}
    return [(product, n) for kind, n in blocks.items() for product in description.probe.products(first[kind], length)]


def all_reduced_bytes(config: Config, description: Description, sizes: GridSizes) -> dict[str | None, float]:
    """Return the bytes that a rank sends in a step to all-reduce the outputs of products, by axis (4D paper, Eq. 4-8).

    They include the all-reduces of the inputs' gradients. Recomputation repeats the forward's all-reduces.
    """
    element, samples = compute_bytes(config), config.train.batch_size / sizes.data
    forwards = 2 if config.train.activation_checkpointing == "full" else 1
    sent = defaultdict[str | None, float](float)
    for product, blocks in products(description, config.train.seq_len):
        contracted, produced = (1 if axis is None else getattr(sizes, axis) for axis in product.split)
        output = sent_bytes("all_reduce", contracted, samples * product.output / (sizes.z * produced) * element)
        gradient = sent_bytes("all_reduce", produced, samples * product.input / (sizes.z * contracted) * element)
        for axis, nbytes in (*[(product.split.contracted, output)] * forwards, (product.split.produced, gradient)):
            sent[axis] += nbytes * blocks
    return sent


def compute_s(config: Config, description: Description, devices: int) -> float:
    """Return a lower bound of the seconds of computation of a step on ``devices`` devices.

    A causal mask hides half of the products of attention, which ``step_flops`` counts.
    """
    tflops = max(product_tflops(config), config.cluster.matmul_tflops, 2 * (config.cluster.attention_tflops or 0))
    return step_flops(config, description) / devices / tflops / 1e12


def utilization(
    config: Config, description: Description, devices: int, seconds: float
) -> tuple[float | None, float | None]:
    """Return MFU and HFU of a step that takes ``seconds``; None if the cluster's peak is unknown."""
    if not config.cluster.peak_tflops:
        return None, None
    possible = config.cluster.peak_tflops * 1e12 * devices * seconds
    flops = description.training_flops(config.train.batch_size, config.train.seq_len)
    return flops / possible, step_flops(config, description) / possible


def compute_bytes(config: Config) -> int:
    """Return the bytes of an element of activations, and of gathered weights unless they are float8."""
    precision = config.train.precision
    if precision == "auto":
        precision = "bf16" if config.cluster.device == "cuda" else "fp32"
    return 4 if precision == "fp32" else 2


def gathered_bytes(config: Config, spec: ParameterSpec) -> int:
    """Return the bytes of an element of a gathered weight, without the scale of a float8 weight."""
    return 1 if config.train.precision == "fp8" and spec.float8 else compute_bytes(config)


def product_tflops(config: Config) -> float:
    """Return the throughput of the products of a linear layer."""
    cluster = config.cluster
    return (config.train.precision == "fp8" and cluster.fp8_tflops) or cluster.matmul_tflops


def compiles(config: Config) -> bool:
    """Return whether torch.compile fuses elementwise functions: ``train.compile``, by default on a GPU."""
    return config.cluster.device == "cuda" if config.train.compile is None else config.train.compile


def splits_backwards(config: Config) -> bool:
    """Return whether a pipeline's schedule computes weight gradients separately from input gradients."""
    pipeline = config.parallel.pipeline
    return pipeline.stages not in (None, 1) and pipeline.schedule in SPLIT_BACKWARDS


def possible_contexts(config: Config, rules: Iterable[Divisibility], sizes: GridSizes) -> list[int]:
    """Return the possible values of ``parallel.context`` on a grid, ascending; a configured value above 1 is fixed.

    More ranks that share samples need less memory and communicate more.
    """
    train, parallel = config.train, config.parallel
    choices = divisors(sizes.batch_shards) if parallel.context == 1 else [parallel.context]
    return [context for context in choices if not grid_problem(rules, train, replace(parallel, context=context), sizes)]


def micro_batch_sizes(config: Config, sizes: GridSizes) -> list[int]:
    """Return the possible microbatch sizes of a device, largest first; only ``train.micro_batch_size`` if it is set.

    Sizes that cannot be cut into ``parallel.chunks``, or do not divide a larger batch of ``train.batch_ramp``, are
    omitted.
    """
    shards, given = sizes.sample_shards(config.parallel.context), config.train.micro_batch_size
    shares = [size // shards for size in batch_sizes(config.train)]
    possible = [size for size in divisors(shares[-1])[::-1] if all(share % min(size, share) == 0 for share in shares)]
    choices = [given] if given is not None else possible
    return [size for size in choices if not chunk_problem(config.train, config.parallel, sizes, size)]


def converts_weights(config: Config, sizes: GridSizes) -> bool:
    """Return whether master weights are converted to the compute dtype without a gather, so that caching them pays."""
    return sizes.z == 1 and compute_bytes(config) < MASTER_BYTES and config.model.lora is None

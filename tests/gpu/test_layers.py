"""Check 1: each layer, eager and compiled, against the same layer in float64 on the CPU, and equal random bits."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from gpt4d.model import registry
from gpt4d.model.gpt2 import GPT2Config
from gpt4d.model.module import initialize
from gpt4d.parallel import compile, random
from gpt4d.parallel.comm.pending import Pending
from gpt4d.parallel.context import Context
from gpt4d.parallel.engine.interleave import run_alone
from gpt4d.parallel.grid import Grid
from gpt4d.parallel.layers import activations, attention, attention_backends, conv, linear, loss, norm
from gpt4d.parallel.layers.embedding import PositionEmbeddingSpec, TokenEmbeddingSpec
from gpt4d.parallel.layers.experts import ExpertsSpec
from gpt4d.parallel.layers.group_norm import GroupNormSpec
from gpt4d.parallel.layers.heads import Rotary
from gpt4d.parallel.layers.module import Layer
from gpt4d.parallel.layers.routing import RouterSpec, Routing, Scoring
from gpt4d.parallel.layers.sequence import Documents, TokenIndex
from gpt4d.parallel.sharded_weights import ShardedWeights
from tests.gpu import compiling
from tests.gpu.check import Check
from tests.gpu.usage import synchronize

_BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 1e-2}  # norm of the error over the norm of the reference
_DROP = 0.1
_KEY = random.key(0, "gpu_check")


class Sizes(NamedTuple):
    batch: int
    length: int
    hidden: int
    heads: int
    vocabulary: int

    @property
    def frequencies(self) -> list[float]:
        """Angles per position of rotary embeddings, in radians."""
        size = self.hidden // self.heads
        return [1e4 ** (-2 * pair / size) for pair in range(size // 2)]

    @property
    def columns(self) -> int:
        """The padded vocabulary."""
        return self.vocabulary + 8


SIZES = {"cuda": Sizes(4, 512, 1024, 16, 5000), "cpu": Sizes(2, 24, 32, 4, 50)}


class Values:
    """Random values that bf16 holds exactly, the same on every device and in every dtype; and the layer's stream."""

    def __init__(self, sizes: Sizes, dtype: torch.dtype, device: torch.device):
        self.sizes, self.dtype, self.device = sizes, dtype, device
        self.generator = torch.Generator().manual_seed(0)
        master = torch.float64 if dtype == torch.float64 else torch.float32
        self.weights = ShardedWeights(Context(Grid.single_device(), dtype), master, device)
        self.inputs: dict[str, torch.Tensor] = {}

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator).bfloat16().to(self.device, self.dtype)

    def input(self, *shape: int) -> torch.Tensor:
        """Return values whose gradient is compared."""
        return self.inputs.setdefault(f"input {len(self.inputs)}", self.normal(*shape).requires_grad_())

    def sequences(self) -> torch.Tensor:
        return self.input(self.sizes.batch, self.sizes.length, self.sizes.hidden)

    def rows(self, *fused: int) -> torch.Tensor:
        """Return the features of all tokens, ``fused`` times."""
        return self.input(self.sizes.batch * self.sizes.length, *fused, self.sizes.hidden)

    def images(self) -> torch.Tensor:
        """Return images with ``sizes.hidden`` channels."""
        return self.input(self.sizes.batch, 8, 8, self.sizes.hidden)

    def ids(self, vocabulary: int) -> torch.Tensor:
        shape = self.sizes.batch, self.sizes.length
        return torch.randint(vocabulary, shape, generator=self.generator).to(self.device)

    def tokens(self, with_documents: bool = False, shared: bool = False) -> TokenIndex:
        """Return the tokens of a batch, perhaps with documents. ``shared``: of sequences with twice as many tokens."""
        samples, context = torch.arange(self.sizes.batch, device=self.device), TwinRanks() if shared else None
        places = torch.arange(self.sizes.length * (context.size if context else 1), device=self.device)
        lengths = samples[:, None] + self.sizes.length // 3
        documents = Documents.ending_with(0, (places + 1) % lengths) if with_documents else None
        axis = self.weights.context.grid.axis(None)
        return TokenIndex(samples + 7, self.sizes.length, axis, documents, context=context)


class TwinRanks:
    """The second rank of an axis whose first rank has the same tensors."""

    size, index = 2, 1

    def start_all_gather(self, shard: torch.Tensor) -> Pending:
        return Pending(torch.cat((shard, shard)))

    def start_reduce_scatter(self, full: torch.Tensor) -> Pending:
        return Pending(full.unflatten(0, (2, -1)).sum(0))


Case = Callable[[Values], tuple[nn.Module, Callable[[], torch.Tensor]]]
"""Builds a layer, and a function that calls it."""


def _product(values: Values, of_images: bool = False, **options: Any):
    hidden = values.sizes.hidden
    if of_images:
        spec, x = conv.Conv2dSpec(hidden, hidden // 2, 3, padding=1, **options), values.images()
    else:
        spec, x = linear.LinearSpec(hidden, 2 * hidden, **options), values.sequences()
    layer = Layer(spec, values.weights)
    return layer, lambda: run_alone(layer(x))


def _embedding(values: Values):
    layer = Layer(TokenEmbeddingSpec(values.sizes.columns, values.sizes.hidden), values.weights)
    ids = values.ids(values.sizes.vocabulary)
    return layer, lambda: layer(ids, values.tokens())


def _positions(values: Values, with_documents: bool = False):
    layer = Layer(PositionEmbeddingSpec(values.sizes.length, values.sizes.hidden), values.weights)
    x = values.rows()
    return layer, lambda: layer(x, values.tokens(with_documents))


def _norm(values: Values, spec: type):
    layer, x = Layer(spec(values.sizes.hidden), values.weights), values.sequences()
    return layer, lambda: sum(layer(x, x))


def _group_norm(values: Values):
    layer, x = Layer(GroupNormSpec(8, (values.sizes.hidden,), activates=True), values.weights), values.images()
    scale_and_shift = values.input(2, len(x), values.sizes.hidden)
    return layer, lambda: layer(x, *scale_and_shift)


def _head(values: Values):
    embedding = Layer(TokenEmbeddingSpec(values.sizes.columns, values.sizes.hidden), values.weights)
    head, x = Layer(linear.TiedHeadSpec(), values.weights), values.sequences()
    return embedding, lambda: run_alone(head(x, embedding.weight))


def _cross_entropy(values: Values):
    s = values.sizes
    logits, targets = values.input(s.batch, s.length, s.columns), values.ids(s.vocabulary)
    return nn.Module(), lambda: loss.cross_entropy_sum(logits, targets, s.vocabulary, values.weights.context.grid.x)


def _activation(values: Values, biased: bool):
    inputs = (values.rows(), values.input(values.sizes.hidden)) if biased else (values.rows(2),)
    return nn.Module(), partial(activations.gelu_of_biased if biased else activations.SwigluFunction.apply, *inputs)


def _router(values: Values):
    spec = RouterSpec(values.sizes.hidden, 8, Scoring(2, normalized=True), 1, balance_rate=0.1, z_loss=0.1)
    layer, x = Layer(spec, values.weights), values.rows()
    return layer, lambda: run_alone(layer(x, values.tokens())).weights


def _experts(values: Values):
    layer = Layer(ExpertsSpec(values.sizes.hidden, 2 * values.sizes.hidden, 8), values.weights)
    x = values.rows()
    weights = values.input(len(x), 2)
    experts = torch.stack([values.ids(4).flatten(), 4 + values.ids(3).flatten()], 1)  # the last expert has no tokens
    wide = torch.promote_types(values.dtype, torch.float32)
    return layer, lambda: run_alone(layer(x, Routing(weights.to(wide), experts)))


def _dropout(values: Values):
    layer, x = Layer(activations.DropoutSpec(_DROP), values.weights), values.rows()
    layer.key = _KEY
    return layer, lambda: layer(x, values.tokens())


def _attention(values: Values, drop: float = 0.0, with_documents: bool = False):
    layer, qkv = Layer(attention.FusedAttentionSpec(values.sizes.heads, drop), values.weights), values.rows(3)
    layer.key = _KEY
    return layer, lambda: run_alone(layer(qkv, values.tokens(with_documents)))


def _grouped_attention(values: Values, with_documents: bool = False, shared: bool = False):
    """Rotated queries and keys, a quarter as many heads of keys and values as of queries."""
    s = values.sizes
    layer, rotary = Layer(attention.AttentionSpec(s.heads), values.weights), Rotary(s.frequencies)
    q = values.input(s.batch, s.length, s.heads, s.hidden // s.heads)
    k, v = (values.input(s.batch, s.length, s.heads // 4, s.hidden // s.heads) for _ in range(2))

    def call() -> torch.Tensor:
        tokens = values.tokens(with_documents, shared)
        return run_alone(layer(rotary(q, tokens), rotary(k, tokens), v, tokens))

    return layer, call


CASES: dict[str, Case] = {
    "linear": _product,
    "linear transposed": partial(_product, transposed=True),
    "linear fused": partial(_product, num_fused=3),
    "embedding": _embedding,
    "positions": _positions,
    "positions of documents": partial(_positions, with_documents=True),
    "layer norm": partial(_norm, spec=norm.LayerNormSpec),
    "RMS norm": partial(_norm, spec=norm.RMSNormSpec),
    "group norm": _group_norm,
    "convolution": partial(_product, of_images=True),
    "convolution with stride": partial(_product, of_images=True, stride=2),
    "convolution of enlarged images": partial(_product, of_images=True, upsampling=2),
    "head": _head,
    "cross-entropy": _cross_entropy,
    "GELU": partial(_activation, biased=True),
    "SwiGLU": partial(_activation, biased=False),
    "router": _router,
    "experts": _experts,
    "dropout": _dropout,
    "attention": _attention,
    "attention of documents": partial(_attention, with_documents=True),
    "grouped attention": _grouped_attention,
    "grouped attention of documents": partial(_grouped_attention, with_documents=True),
    "attention of shared sequences": partial(_grouped_attention, shared=True),
    "attention of documents in shared sequences": partial(_grouped_attention, with_documents=True, shared=True),
    "attention with dropout": partial(_attention, drop=_DROP),
    "attention of documents with dropout": partial(_attention, drop=_DROP, with_documents=True),
}


def compute(case: Case, sizes: Sizes, dtype: torch.dtype, device: torch.device) -> dict[str, torch.Tensor]:
    """Return the output of a layer and all gradients, by name, of two microbatches: the second adds to the first's."""
    values = Values(sizes, dtype, device)
    layer, call = case(values)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(values.normal(*parameter.shape))
    for _ in range(2):
        output = call()
        output.backward(values.normal(*output.shape))
    values.weights.schedule.finish()
    trained = (*values.inputs.items(), *layer.named_parameters())
    gradients = {name: x.grad for name, x in trained if x.grad is not None}
    return {"output": output.detach(), **{f"gradient of {name}": grad for name, grad in gradients.items()}}


@pytest.mark.gpu(number=1, part=1, limit_s=130, functions=20, work_s=25)
def test_layers_agree_with_float64_on_the_cpu(check: Check) -> None:
    device, errors = check.device, check.values.setdefault("errors", {})
    torch.set_float32_matmul_precision("highest")  # no TF32
    conv.choose_algorithms(device, replicates=False)
    attention_backends.use_installed_kernels(device)
    compiling.enable(device)
    variants = [(dtype, bound, False) for dtype, bound in _BOUNDS.items()]
    variants.append((torch.bfloat16, _BOUNDS[torch.bfloat16], True))
    for name, case in CASES.items():
        with patch.object(compile, "enabled", False):
            reference = compute(case, SIZES[check.device_type], torch.float64, torch.device("cpu"))
        for dtype, bound, compiled in variants:
            variant = str(dtype).removeprefix("torch.") + " compiled" * compiled
            with patch.object(compile, "enabled", compiled):
                found = compute(case, SIZES[check.device_type], dtype, device)
            for tensor, exact in reference.items():
                error = ((found[tensor].to(exact) - exact).norm() / exact.norm()).item()
                errors.setdefault(variant, {})[f"{name}: {tensor}"] = error
                # A negated comparison: NaN is a problem.
                check.require(error < bound, f"{name} in {variant}: {tensor} has a relative error of {error:.1e}")
    check.values["graphs"] = graphs = compiling.num_graphs()
    check.require(graphs > 0, "no layer has a compiled function")
    largest = {variant: max(by_tensor.values()) for variant, by_tensor in errors.items()}
    check.figure = "errors up to " + ", ".join(f"{error:.1e} in {variant}" for variant, error in largest.items())
    with patch.object(compile, "enabled", False):
        _check_bits(check, device)
        _check_kernels(check, SIZES[check.device_type], device)


def _check_bits(check: Check, device: torch.device) -> None:
    """Require initial weights and dropout masks to have the same bits as on the CPU."""
    config = GPT2Config(layers=2, hidden=64, heads=4, vocab_size=1000, max_positions=64)
    streams = [
        ShardedWeights(Context(Grid.single_device(), torch.float32), device=place)
        for place in (torch.device("cpu"), device)
    ]
    models = [registry.build(config, weights) for weights in streams]
    for model in models:
        initialize(model, 1, model.context.grid)
    for (name, expected), actual in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        check.require(torch.equal(expected, actual.cpu()), f"the initial values of {name} differ from the CPU's")
    rows = random.fold(_KEY, torch.arange(1000))
    for columns, offset in ((256, 0), (101, 3)):
        expected, actual = (random.keep_mask(rows.to(place), columns, offset, _DROP) for place in ("cpu", device))
        check.require(torch.equal(expected, actual.cpu()), f"a dropout mask from column {offset} differs")


def _check_kernels(check: Check, sizes: Sizes, device: torch.device) -> None:
    """Require attention in bf16, causal and of documents, to use a fused kernel, for documents one without a mask."""
    kernels = check.values["attention_kernels"] = {}
    names_of_kernels = {"attention": ("flash", "cudnn", "attn_fwd")}
    if torch.version.hip is None:
        names_of_kernels["attention of documents"] = ("flash",)
    for case, parts in names_of_kernels.items():
        activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA][: 1 + (device.type == "cuda")]
        with profile(activities=activities) as profiler:
            compute(CASES[case], sizes, torch.bfloat16, device)
            synchronize(device)
        events = profiler.events()
        if device.type == "cuda":
            events = [event for event in events if event.device_type == torch.autograd.DeviceType.CUDA]
        names = sorted({event.name for event in events})
        fused = [name for name in names if any(part in name.lower() for part in parts)]
        kernels[case] = fused
        check.figure += f"; {case} by {fused[0][:60] if fused else 'no fused kernel'}"
        check.require(bool(fused), f"{case} in bf16 uses no {' or '.join(parts)} kernel, but {', '.join(names)}")
    if device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0):
        check.require(
            any("sm90" in name.lower() for name in kernels["attention"]),
            "attention in bf16 uses no kernel for Hopper; install cuDNN 9.15.1 or newer, or flash_attn_interface",
        )

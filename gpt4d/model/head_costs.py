"""The cost of head and loss in parts (gpt4d.parallel.layers.head_loss). No torch here."""

from dataclasses import dataclass, replace

from gpt4d.model.costs import MASTER_BYTES, CrossEntropyCost
from gpt4d.model.description import Description, Unit, Walk
from gpt4d.model.product_costs import LinearCost
from gpt4d.parallel.layout import ParameterSpec
from gpt4d.parallel.order import LayerWeights


@dataclass(frozen=True)
class HeadLossCost:
    """A head and the loss of its logits, ``num_chunks`` parts of the tokens one after another.

    Its forward computes the gradients too: its backward uses no weight.
    """

    head: LinearCost
    loss: CrossEntropyCost
    num_chunks: int

    def parameters(self) -> dict[str, ParameterSpec]:
        return self.head.parameters()

    def weights(self) -> LayerWeights:
        return self.head.weights()._replace(recomputation=(), backward=())

    def flops(self, length: int) -> float:
        return self.head.flops(length)

    async def forward(self, walk: Walk) -> None:
        (weight,) = self.weights().forward
        sizes, (contracted, produced) = self.head.sizes(walk), self.head.split
        split, elements = walk.sequence_parallel and walk.size(produced) > 1, walk.element_bytes
        if split:
            walk.hold(sizes.in_bytes)
            walk.do("all_gather", "x", sizes.in_bytes // walk.size(produced))
        walk.gather(weight)
        x, logits = sizes.in_bytes // self.num_chunks, sizes.out_bytes // self.num_chunks
        flops = sizes.flops / self.num_chunks
        gradient = sizes.weight * MASTER_BYTES
        for number in range(self.num_chunks):
            walk.hold(logits)
            walk.compute(flops, x + sizes.weight * elements + logits)
            walk.wait(walk.start("all_reduce", contracted, logits))
            tokens = walk.tokens // self.num_chunks
            self.loss.forward_of(walk, tokens)
            self.loss.backward_of(walk, tokens)
            walk.hold(x)
            walk.compute(flops, x + sizes.weight * elements + logits)
            pending = None if split else walk.start("all_reduce", produced, x)
            if not walk.overlap.all_reduce:
                walk.wait(pending)
                pending = None
            added = walk.adds_products and number > 0
            walk.hold(0 if added else gradient)
            self.head.convert_factors(walk, x, logits)
            walk.compute(flops, x + logits + gradient * (2 if added else 1))
            if number and not added:
                walk.compute(moved=3 * gradient)
                walk.release(gradient)
            walk.wait(pending)
            walk.release(logits)
        walk.multiplied()
        walk.scratch(sizes.in_bytes)
        walk.compute(moved=2 * sizes.in_bytes)
        walk.release(sizes.in_bytes)  # the input
        if split:
            walk.do("reduce_scatter", "x", sizes.in_bytes)
            walk.release(sizes.in_bytes)  # the gradient before it was scattered, whose part takes the input's place

    async def backward(self, walk: Walk) -> None:
        sizes, (_, produced) = self.head.sizes(walk), self.head.split
        split = walk.sequence_parallel and walk.size(produced) > 1
        (weight,) = self.weights().forward
        part = sizes.in_bytes // (walk.size(produced) if split else 1)

        def weight_gradient() -> None:
            gradient, added = sizes.weight * MASTER_BYTES, walk.has_earlier_sum(weight)
            walk.compute(moved=gradient * (3 if added else 2))
            walk.release(gradient if added else 0)
            walk.scatter(weight, added)

        walk.compute_weight_gradient(weight_gradient, kept=0)  # the gradient for a loss whose own gradient is 1 is held
        walk.compute(moved=2 * part)


def with_loss_chunks(description: Description, num_chunks: int) -> Description:
    """Return a model of text whose head and loss take the tokens in ``num_chunks`` parts."""
    *units, head, loss = description.units
    assert isinstance(head.layer, LinearCost) and isinstance(loss.layer, CrossEntropyCost), "not a model of text"
    both = HeadLossCost(replace(head.layer, source=None), loss.layer, num_chunks)
    return replace(description, units=(*units, Unit("", both)))

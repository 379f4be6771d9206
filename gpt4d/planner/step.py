"""What one device does in a training step: its products, its collectives and what it keeps, layer by layer.

This is gpt4d.model.gpt and the layers' collectives told in sizes. Tests hold it to what a run counts.
"""

from collections.abc import Iterator
from dataclasses import replace

from gpt4d.config import Config, GridSizes
from gpt4d.planner.device import Device, Links
from gpt4d.planner.stream import Gradients, Stream, Use
from gpt4d.planner.workload import MASTER_BYTES, compute_bytes, parameters, training_state

_STATISTICS = 4  # bytes of one number of a norm or of the loss: float32


_LINEARS = "attention.qkv", "attention.output", "mlp.up", "mlp.down"  # a block's, in the order of its forward


class Step:
    """A step of ``config`` on a grid, with the blocks of ``cached``: for each block, whether its weights are kept.

    ``between``: so many blocks more after the first that is not kept, and after the first that is. Only their memory is
    told.
    """

    def __init__(
        self,
        config: Config,
        sizes: GridSizes,
        links: Links,
        micro_batch: int,
        cached: tuple[bool, ...],
        between: tuple[int, int] = (0, 0),
    ):
        # By the number of the block they come after.
        self.between = {cached.index(kind): more for kind, more in enumerate(between) if more}
        self.model = model = replace(config.model, layers=len(cached))
        self.sizes, self.cached = sizes, cached
        self.recompute = config.train.activation_checkpointing == "full"
        self.overlap = config.parallel.overlap
        self.device = Device(config.cluster, links)
        self.e = compute_bytes(config)
        self.length = config.train.seq_len
        self.sequences = micro_batch
        self.tokens = micro_batch * self.length
        self.vocabulary = model.padded_vocab_size // sizes.x
        self.stream_dim = model.hidden // sizes.y  # of the residual stream
        self.inner_dim = model.hidden // sizes.x  # within attention
        self.x_bytes = self.tokens * self.stream_dim * self.e
        self.inner_bytes = self.tokens * self.inner_dim * self.e
        self.found = parameters(model)
        self.gradient_bytes = training_state(config.model, sizes, shard_states=False)["gradients"]
        self.shard_states = config.optim.shard_states

    def run(self, microbatches: int, accumulated: bool = False) -> Device:
        """Goes through so many microbatches, others before them having ``accumulated``, and the update that follows."""
        self.accumulated = accumulated
        self.after_microbatch: list[tuple[float, ...]] = []
        uses = list(self._uses())
        expected = dict.fromkeys(self.found, microbatches)
        expected["tokens.weight"] *= 2
        self.device.hold(self.gradient_bytes if accumulated else 0)
        self.gradients = Gradients(
            self.device,
            self.found,
            self.sizes,
            self.overlap.data,
            self.gradient_bytes,
            self.shard_states,
            expected,
            accumulated,
        )
        weights = {n: self.gradients.elements[n] for n, tensor in self.found.items() if tensor.streamed}
        kept = [block for block, cached in enumerate(self.cached) if cached]
        cached = {f"blocks.{block}.{linear}.weight" for block in kept for linear in _LINEARS}
        self.gradients.spread()  # of the step before
        self.stream = Stream(self.device, weights, uses, cached, self.overlap, self.e, self.gradients)
        for _ in range(microbatches):
            self.stream.begin()
            self._microbatch()
            self.after_microbatch.append(self.device.numbers())
        self.stream.finish()
        self.gradients.finish()
        self.gradients.update()
        return self.device

    def _uses(self) -> Iterator[Use]:
        blocks = range(len(self.cached))
        yield Use("forward", "tokens.weight")
        for block in blocks:
            yield from (Use("forward", f"blocks.{block}.{linear}.weight") for linear in _LINEARS)
        yield Use("forward", "tokens.weight")
        yield Use("backward", "tokens.weight")
        for block in reversed(blocks):
            if self.recompute:
                yield from (Use("recomputation", f"blocks.{block}.{linear}.weight") for linear in _LINEARS[:-1])
            yield from (Use("backward", f"blocks.{block}.{linear}.weight") for linear in reversed(_LINEARS))

    def _microbatch(self) -> None:
        device, x = self.device, self.x_bytes
        kept_between: dict[int, int] = {}
        self._embed()
        for block in range(len(self.cached)):
            before = device.held
            self._block_forward(keep=not self.recompute)
            if more := self.between.get(block):
                kept_between[block] = more * (device.held - before)
                device.hold(kept_between[block])
        self._norm_forward()
        self._head()
        self._norm_backward("norm")
        device.release(x)  # the last block's output
        for block in reversed(range(len(self.cached))):
            if self.recompute:
                self._block_forward(keep=True, to_the_end=False)
            if block in kept_between:
                device.release(kept_between[block])
                self._gradients_between(block)
            self._block_backward(block)
        self._embed_backward()

    def _gradients_between(self, block: int) -> None:
        of_one = sum(elements for name, elements in self.gradients.elements.items() if name.startswith("blocks.0."))
        if not self.accumulated:
            self.device.hold(self.between[block] * of_one * MASTER_BYTES)

    # ------------------------------------------------------------------------------------------------ the ends

    def _embed(self) -> None:
        device, x = self.device, self.x_bytes
        self.stream.gather(again=False)
        device.hold(x)
        device.compute(moved=2 * x, operations=5)
        self.stream.done()
        device.do("all_reduce", "x", x)
        device.hold(x)  # with the positions added
        device.compute(moved=3 * x, operations=2)
        device.release(x)

    def _embed_backward(self) -> None:
        device = self.device
        table = self.stream.whole("tokens.weight") * MASTER_BYTES
        rows = self.tokens * self.stream_dim * MASTER_BYTES
        positions = self.gradients.elements["positions.weight"] * MASTER_BYTES
        device.hold(positions)
        device.compute(moved=2 * self.x_bytes, operations=3)
        self.gradients.add("positions.weight")
        device.scratch(rows + table)
        device.hold(table)
        device.compute(moved=5 * rows + table, operations=3)
        device.release(self.x_bytes)
        # The table's gradient is there in the master's dtype already.
        device.hold(table * self.e // MASTER_BYTES if self.e != MASTER_BYTES else 0)
        device.release(table if self.e != MASTER_BYTES else 0)
        self.stream.scatter("tokens.weight")

    def _head(self) -> None:
        """The logits and the loss, forward and backward: nothing comes between."""
        device, x, tokens = self.device, self.x_bytes, self.tokens
        logits, wide = tokens * self.vocabulary * self.e, tokens * self.vocabulary * 4
        flops = 2 * tokens * self.stream_dim * self.vocabulary
        self.stream.gather()
        device.hold(logits)
        device.compute(flops, logits)
        device.do("all_reduce", "y", logits)
        self.stream.done()
        if self.e != 4:
            device.hold(wide)
        device.compute(moved=wide)
        device.do("all_reduce", "x", tokens * _STATISTICS)
        device.hold(wide)  # less the largest; of that the exponentials, the probabilities and the gradient
        device.compute(moved=7 * wide, operations=9)
        device.do("all_reduce", "x", 2 * tokens * _STATISTICS)
        device.release(logits + (wide if self.e != 4 else 0))

        device.compute(moved=3 * wide, operations=4)
        if self.e != 4:
            device.hold(logits)
            device.release(wide)
        self.stream.gather()
        device.hold(x)
        device.compute(flops, x)
        self.stream.done()
        summing = device.start("all_reduce", "x", x)
        if not self.overlap.all_reduce:
            device.wait(summing)
        gradient = self.stream.whole("tokens.weight") * self.e
        device.hold(gradient)
        device.compute(flops, gradient)
        self.stream.scatter("tokens.weight")
        device.wait(summing)
        device.release(logits if self.e != 4 else wide)
        device.release(x)  # what the head multiplied

    def _norm_forward(self) -> None:
        """Holds its output and its statistics."""
        device, x = self.device, self.x_bytes
        device.hold(x + 2 * self.tokens * _STATISTICS)
        if self.sizes.y == 1:
            device.compute(moved=3 * x)
            return
        wide = self.tokens * self.stream_dim * 4
        device.scratch((1 if self.e == 4 else 2) * wide)
        device.compute(moved=12 * wide, operations=14)
        device.do("all_gather", "y", 2 * self.tokens * _STATISTICS)

    def _norm_backward(self, name: str) -> None:
        """Of a gradient that is held to one of the same size; what was kept for it is dropped."""
        device, x = self.device, self.x_bytes
        if self.sizes.y == 1:
            device.scratch(x)
            device.compute(moved=4 * x)
        else:
            wide = self.tokens * self.stream_dim * 4
            device.scratch(5 * wide)
            device.compute(moved=20 * wide, operations=16)
            device.do("all_reduce", "y", 2 * self.tokens * _STATISTICS)
        device.release(2 * self.tokens * _STATISTICS)
        self._vector(f"{name}.weight")
        self._vector(f"{name}.bias")

    def _vector(self, name: str) -> None:
        self.device.hold(self.gradients.elements[name] * MASTER_BYTES)
        self.gradients.add(name)

    # ----------------------------------------------------------------------------------------------- a block

    def _block_forward(self, keep: bool, to_the_end: bool = True) -> None:
        """Holds the output and, to ``keep`` it for the backward, what came before. The input is held already."""
        device, x, inner = self.device, self.x_bytes, self.inner_bytes
        qkv, output, up, down = _LINEARS
        drop = (lambda _: None) if keep else device.release
        norm = x + 2 * self.tokens * _STATISTICS
        self._norm_forward()
        self._multiply(qkv, 3 * inner)
        self._attention()
        drop(3 * inner)
        self._multiply(output, x)
        drop(inner + self._attention_kept())
        device.hold(x)  # the residual stream after attention
        drop(norm)
        device.compute(moved=3 * x)
        device.release(x)
        self._norm_forward()
        self._multiply(up, 4 * inner)
        device.hold(4 * inner)
        device.compute(moved=2 * 4 * inner)  # GELU
        drop(4 * inner)
        if to_the_end:
            self._multiply(down, x)
            drop(4 * inner + norm)
            device.hold(x)
            device.compute(moved=3 * x)
            device.release(x)
            drop(x)

    def _axes(self, name: str) -> tuple[str, str]:
        """Those that split the rows and the columns of a weight: contracted in the forward, and produced."""
        rows, *_, columns = self.found[f"{name}.weight"].layout.dims
        return rows[0], columns[0]

    def _flops(self, name: str) -> float:
        return 2 * self.tokens * self.stream.whole(f"{name}.weight")

    def _multiply(self, linear: str, out: int) -> None:
        name, device = f"blocks.0.{linear}", self.device  # all blocks' are alike
        contracted, _ = self._axes(name)
        self.stream.gather()
        device.hold(out)
        device.compute(self._flops(name), 2 * out, operations=2)
        self.stream.done()
        device.do("all_reduce", contracted, out)

    def _multiply_backward(self, block: int, linear: str, d_in: int, d_out: int, kept: int) -> None:
        """From the gradient of the output, which is held, to that of the input."""
        device, name = self.device, f"blocks.{block}.{linear}"
        _, produced = self._axes(name)
        flops = self._flops(name)
        self.stream.gather()
        device.hold(d_in)
        device.compute(flops, d_in)
        self.stream.done()
        summing = device.start("all_reduce", produced, d_in)
        if not self.overlap.all_reduce:
            device.wait(summing)
        gradient = self.stream.whole(f"{name}.weight") * self.e
        device.hold(gradient)
        device.compute(flops, gradient)
        self.stream.scatter(f"{name}.weight")
        device.compute(moved=d_out)
        self._vector(f"{name}.bias")
        device.wait(summing)
        device.release(d_out + kept)

    def _attention(self) -> None:
        device, inner = self.device, self.inner_bytes
        scores, flops = self._scores()
        device.hold(inner + self._attention_kept())
        device.compute(flops, 4 * inner + 6 * scores)

    def _attention_kept(self) -> int:
        """Bytes, besides what goes in and comes out."""
        return self.tokens * self.model.heads // self.sizes.x * _STATISTICS + self._scores()[0]

    def _attention_backward(self) -> None:
        """From the gradient of its output, which is held, to that of queries, keys and values."""
        device, inner = self.device, self.inner_bytes
        scores, flops = self._scores()
        device.hold(3 * inner)
        device.scratch(scores)
        device.compute(2.5 * flops, 8 * inner + 8 * scores)
        device.release(self._attention_kept())
        device.release(inner + 3 * inner)  # the gradient it came from; queries, keys and values

    def _scores(self) -> tuple[int, float]:
        """Bytes of the attention weights, where they are written out, and FLOPs of one pass.

        The half that the causal mask leaves is computed about half as fast as a large product: counted whole.
        """
        flops = 4 * self.tokens * self.length * self.inner_dim
        if not self.model.attention_dropout:
            return 0, flops
        return self.sequences * self.model.heads // self.sizes.x * self.length**2 * 3 * self.e, flops

    def _block_backward(self, block: int) -> None:
        device, x, inner = self.device, self.x_bytes, self.inner_bytes
        qkv, output, up, down = _LINEARS
        # The gradient of the block's output is held, and stays so: it is that of the residual stream too.
        self._multiply_backward(block, down, 4 * inner, x, 4 * inner - x)
        device.hold(4 * inner)
        device.compute(moved=3 * 4 * inner)  # GELU
        device.release(2 * 4 * inner)  # its input, and the gradient of its output
        self._multiply_backward(block, up, x, 4 * inner, x)
        self._norm_backward(f"blocks.{block}.mlp_norm")
        device.compute(moved=3 * x)
        device.release(x)
        self._multiply_backward(block, output, inner, x, inner - x)
        self._attention_backward()
        self._multiply_backward(block, qkv, x, 3 * inner, x)
        self._norm_backward(f"blocks.{block}.attention_norm")
        device.compute(moved=3 * x)
        device.release(x)
        device.release(2 * x)  # the residual stream after attention and before the block

"""Limits on communication in flight and on sizes of messages and blocks, shared by layers and planner. Torch-free."""

MAX_INFLIGHT_REDUCE_SCATTERS = 8  # each holds a full gradient in memory
MAX_INFLIGHT_PARAM_GATHERS = 2  # on a link that transfers share, more would delay the one that is needed first
_SMALLEST_BUCKET, _LARGEST_BUCKET = 1 << 20, 32 << 20  # bytes: below, latency dominates; above, it is negligible
# Between hosts of CPUs, long tensors travel in pieces: their parts inside the hosts overlap, and gloo transfers long
# messages at little more than half the rate of a link. What the computation does not wait for, the weights and
# gradients of z and data, travels in smaller ones: with little in flight it yields to the others on the link.
_PIECE_BYTES, _MOST_PIECES = 1 << 18, 32
_YIELDING_PIECE_BYTES, _MOST_YIELDING_PIECES = 1 << 16, 128
# Of logits or a matrix that is converted to float32 at a time: 16 MiB, which caches of GPUs hold.
_BLOCK_ELEMENTS = 1 << 22


def num_pieces(nbytes: float, yielding: bool = False) -> int:
    """Return the number of pieces in which a rank of a CPU sends ``nbytes`` to a rank of another host.

    ``yielding``: the computation does not wait for them.
    """
    piece, most = (_YIELDING_PIECE_BYTES, _MOST_YIELDING_PIECES) if yielding else (_PIECE_BYTES, _MOST_PIECES)
    return int(min(max(1, nbytes // piece), most))


def bucket_bytes(gradient_bytes: int) -> int:
    """Return the size in bytes of the buckets in which gradients of ``gradient_bytes`` in total are reduced.

    A bucket is a 32nd of the gradients, within bounds: the first reduction starts early in the backward, and little is
    left when it ends.
    """
    return min(max(gradient_bytes // 32, _SMALLEST_BUCKET), _LARGEST_BUCKET)


def block_rows(columns: int) -> int:
    """Return how many rows of a matrix with ``columns`` columns are converted to float32 at a time."""
    return max(1, _BLOCK_ELEMENTS // columns)

"""The pieces in which long tensors travel between hosts of CPUs. No torch here."""

# Their parts inside the hosts overlap, and gloo transfers long messages at little more than half the rate of a link.
PIECE_BYTES, _MAX_PIECES = 1 << 18, 32
# The computation does not wait for the weights and gradients of z and data. They travel in smaller pieces: with little
# in flight, they yield to other messages on the link.
YIELDING_PIECE_BYTES, _MAX_YIELDING_PIECES = 1 << 16, 128


def num_pieces(nbytes: float, yielding: bool = False) -> int:
    """Return the number of pieces in which a rank of a CPU sends ``nbytes`` to a rank of another host.

    ``yielding``: the computation does not wait for them.
    """
    piece, maximum = (YIELDING_PIECE_BYTES, _MAX_YIELDING_PIECES) if yielding else (PIECE_BYTES, _MAX_PIECES)
    return int(min(max(1, nbytes // piece), maximum))

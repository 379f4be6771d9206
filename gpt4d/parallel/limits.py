"""Limits on communication in flight and on message sizes, shared by layers and planner. Torch-free."""

MAX_INFLIGHT_REDUCE_SCATTERS = 8  # each holds a full gradient in memory
_SMALLEST_BUCKET, _LARGEST_BUCKET = 1 << 20, 32 << 20  # bytes: below, latency dominates; above, it is negligible


def bucket_bytes(gradient_bytes: int) -> int:
    """Return the size in bytes of the buckets in which gradients of ``gradient_bytes`` in total are reduced.

    A bucket is an eighth of the gradients, within bounds: the first reduction starts after an eighth of the backward,
    and at most an eighth is left when the backward ends.
    """
    return min(max(gradient_bytes // 8, _SMALLEST_BUCKET), _LARGEST_BUCKET)

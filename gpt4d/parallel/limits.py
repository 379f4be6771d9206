"""How much communication is under way at once, and in what portions: rules for layers and planner. No torch."""

MAX_INFLIGHT_REDUCE_SCATTERS = 8  # at the most: each holds a whole gradient in memory
_SMALLEST_BUCKET, _LARGEST_BUCKET = 1 << 20, 32 << 20  # bytes: below, latency counts; above, it no longer does


def bucket_bytes(gradients: int) -> int:
    """Of a bucket of gradients, of so many bytes in all, that are summed as one.

    The first sets off after an eighth of the backward, and no more than that is left at its end.
    """
    return min(max(gradients // 8, _SMALLEST_BUCKET), _LARGEST_BUCKET)

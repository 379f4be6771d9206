"""Profiles of other trainers: overlap, fused operations, recomputation. The default profile is gpt4d itself.

A profile follows from the trainer's papers and code, never from a measured run.
"""

from dataclasses import dataclass, replace

# FlashAttention-2 reaches 1.7 times the rate of FlashAttention on an A100 (arXiv 2307.08691, Fig. 4); FlashAttention-3
# and cuDNN reach 1.6 times the rate of FlashAttention-2 on an H100 (arXiv 2407.08608, Fig. 5).
_OLDER_KERNEL = 0.6


@dataclass(frozen=True)
class TrainerProfile:
    """Differences of a trainer from gpt4d.

    Attributes:
        source: papers and code that say so.
        fused: elementwise operations run in fused kernels, as with ``train.compile``.
        blocking: the parts of ``parallel.overlap`` that do not overlap computation.
        overlapped_tensor: fraction of tensor-parallel collectives that runs in slices, overlapped with products.
        shards_states: ranks of the data axis share the optimizer's states (ZeRO-1).
        sequence_parallel: tensor parallelism also splits tokens wherever it is used.
        half_weights: unsharded weights stay in the compute dtype between microbatches.
        flash_attention: version of its attention kernel; None: the fastest that the GPU has.
        score_passes: reads and writes of all scores in a forward, if no fused kernel keeps them on the chip.
        recomputes_all: full recomputation includes the last product of a block, whose result no backward needs.
        recomputed_products: fraction of a forward's products that selective recomputation repeats.
        logit_bytes: memory of each logit in addition to gpt4d's single copy.
        float8_copies: bytes of the conversions to float8, relative to gpt4d's.
    """

    source: str
    fused: bool = True
    blocking: tuple[str, ...] = ()
    overlapped_tensor: float = 0.0
    shards_states: bool = False
    sequence_parallel: bool = False
    half_weights: bool = False
    flash_attention: int | None = None
    score_passes: float = 0.0
    recomputes_all: bool = False
    recomputed_products: float = 0.0
    logit_bytes: float = 0.0
    float8_copies: float = 1.0

    def attention_share(self, newest: int) -> float:
        """Return the rate of its attention kernel relative to version ``newest`` of FlashAttention."""
        return _OLDER_KERNEL ** (newest - min(newest, self.flash_attention or newest))

    def overrides(self, sharded: bool, several: bool) -> list[str]:
        """Return the settings of a run that the profile decides.

        Args:
            sharded: z shards weights.
            several: a step has several microbatches.
        """
        kept = ["parallel.cache_layers=all", f"parallel.cache_scope={'step' if several else 'microbatch'}"]
        return [
            *(kept if self.half_weights and not sharded else []),
            f"train.compile={str(self.fused).lower()}",
            f"optim.shard_states={str(self.shards_states).lower()}",
            *(f"parallel.overlap.{name}=false" for name in self.blocking),
        ]


# Without dropout's mask: in a forward, products write and read the scores, softmax and dropout read and write them; in
# the backward twice as many. The planner counts 2.5 times the forward.
_UNFUSED = 4.6

_MEGATRON_2021 = TrainerProfile(
    "arXiv 2104.04473 §4.2: blocking all-reduces, attention of batched products and a fused masked softmax",
    blocking=("all_reduce", "data"),
    half_weights=True,
    score_passes=_UNFUSED,
    recomputes_all=True,
)
_MEGATRON_2022 = replace(
    _MEGATRON_2021, source="arXiv 2205.05198 §4: weight gradients overlap input gradients' sums", blocking=("data",)
)
_TORCHTITAN = TrainerProfile(
    "arXiv 2410.06511 §2.2: selective recomputation repeats every second product",
    blocking=("all_reduce",),
    sequence_parallel=True,
    flash_attention=2,
    recomputed_products=0.5,
    logit_bytes=10,  # float32 logits, their gradients in float32 and in bf16 (cross_entropy of pred.float())
)
PROFILES = {
    "gpt4d": TrainerProfile("this code"),
    "megatron-2021": _MEGATRON_2021,
    "megatron-2022": _MEGATRON_2022,
    # Selective recomputation repeats the forward of attention only.
    "megatron-2022-selective": replace(_MEGATRON_2022, score_passes=_UNFUSED * 4.5 / 3.5),
    "megatron": TrainerProfile(
        "Megatron-LM README: communication of data, tensor and pipeline axes overlaps; recipes of Megatron-Bridge",
        overlapped_tensor=0.7,
        shards_states=True,
        sequence_parallel=True,
        half_weights=True,
        float8_copies=0.5,
    ),
    "llm-foundry": TrainerProfile(
        "mosaicml/llm-foundry: FSDP, no compilation, attention in Triton, activation_checkpointing_reentrant: false",
        fused=False,
        flash_attention=1,
    ),
    "internevo": TrainerProfile(
        "InternLM/InternEvo: Hybrid Zero; FlashAttention and fused kernels of Apex",
        shards_states=True,
        half_weights=True,
        recomputes_all=True,
    ),
    "torchtitan": _TORCHTITAN,
    "torchtitan-eager": replace(_TORCHTITAN, fused=False),
    "torchtitan-async": replace(_TORCHTITAN, overlapped_tensor=0.7, blocking=()),
    "axonn": TrainerProfile("arXiv 2305.13525 §IV", recomputes_all=True),
    "zero-3": TrainerProfile("DeepSpeed: overlap_comm", fused=False, recomputes_all=True),
}

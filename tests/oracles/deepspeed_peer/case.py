"""The checkpoints that real DeepSpeed writes for the tests, as data: one line each.

Every case is a tiny model trained for a few steps on CPU. Cases of one launch (the same world, tensor and pipeline
degree) share their processes: importing DeepSpeed takes longer than training.
"""

from __future__ import annotations

from dataclasses import dataclass

STEPS = 3
LR = 1e-3
BETAS = (0.9, 0.95)
DECAY, NO_DECAY = 0.1, 0.0
BATCH, LENGTH = 2, 12
TAG = f"global_step{STEPS}"

FP32, FIRST, SECOND, LOW, STEP = "fp32", "exp_avg", "exp_avg_sq", "lp", "step"
STATES = (FIRST, SECOND)
TRUTH = "truth.json"
SAVED = "saved"
"""Folder into which a resumed run saves what it has loaded."""


@dataclass(frozen=True)
class Launch:
    """What the processes of one launch have in common."""

    world: int = 2
    tp: int = 1
    pp: int = 1

    @property
    def dp(self) -> int:
        return self.world // self.tp // self.pp


@dataclass(frozen=True)
class Case:
    """One checkpoint."""

    name: str
    launch: Launch
    zero: int
    dtype: str = "bf16"
    model: str = "llama"
    vocab: int = 250
    hidden: int = 32
    inner: int = 48
    layers: int = 2
    heads: int = 4
    kv: int = 2
    tied: bool = False
    frozen: str = ""
    """Regular expression: parameters that are not trained."""
    groups: int = 2
    """Two: weight decay for matrices only."""
    sub_group: int = 0
    """ZeRO-3: elements of a sub-group; 0 keeps DeepSpeed's own."""
    aligned: bool = False
    """ZeRO-1/2: `parameter_alignment`."""
    blocks: str = "layers"
    """Name of the module list in the custom model."""
    head_rows: bool = False
    """The custom model's output layer, and the embedding tied to it, are cut along the hidden dim."""
    dealt: bool = False
    """ZeRO-1/2: `round_robin_gradients`, which deals the parameters of a group out to the ranks in turn."""
    elastic: bool = False
    """ZeRO-1/2: `elastic_checkpoint`, which saves states without padding and without settings."""
    accumulate: str = ""
    """`grad_accum_dtype`: with bf16, ZeRO-1 and `fp32` it is BF16_Optimizer that trains."""
    ep: int = 1
    """Expert-parallel degree of the mixture that DeepSpeed's own MoE layers make."""
    data_first: bool = False
    """`use_data_before_expert_parallelism`: neighbouring ranks hold the same experts."""
    ours: bool = False
    """The model is cut by `tx.parallel.tensor_parallel`, and AutoTP finds nothing left to do."""


_ONE2, _ONE4 = Launch(2), Launch(4)
_TP2, _TP4, _TP2DP2 = Launch(2, tp=2), Launch(4, tp=4), Launch(4, tp=2)
_PP2, _PP2DP2, _PP2TP2 = Launch(2, pp=2), Launch(4, pp=2), Launch(4, tp=2, pp=2)

CASES = (
    # Data parallel: every stage, both degrees, both precisions.
    *(Case(f"z{z}-{d}-w{n.world}", n, z, d) for n in (_ONE2, _ONE4) for z in (1, 2, 3) for d in ("bf16", "fp32")),
    Case("odd-z1-w2", _ONE2, 1, model="odd"),
    Case("odd-z2-w4", _ONE4, 2, "fp32", model="odd"),
    Case("odd-z3-w2", _ONE2, 3, "fp32", model="odd"),
    Case("odd-z3-w4", _ONE4, 3, model="odd"),
    Case("odd-aligned-w2", _ONE2, 1, model="odd", aligned=True),
    Case("odd-aligned-w4", _ONE4, 2, model="odd", aligned=True),
    Case("sub-groups-w2", _ONE2, 3, sub_group=6000),
    Case("sub-groups-odd-w4", _ONE4, 3, "fp32", model="odd", sub_group=40),
    Case("one-group-w2", _ONE2, 1, groups=1),
    # The model of tp4, tp4-fused and tp4-uneven, for resuming them at another degree.
    Case("tp1-wide", _ONE2, 1, heads=8, kv=4),
    Case("tp1-wide-z3", _ONE2, 3, heads=8, kv=4),
    Case("tp1-wide-fused", _ONE2, 1, model="fused", heads=8, kv=4),
    Case("tp1-uneven", _ONE2, 2, hidden=48, heads=6, kv=2, vocab=251),
    Case("one-group-sub-groups-w2", _ONE2, 3, groups=1, sub_group=6000),
    Case("mixtral-z1-w2", _ONE2, 1, model="mixtral"),
    Case("mixtral-z3-w2", _ONE2, 3, model="mixtral"),
    Case("tied-z1-w2", _ONE2, 1, tied=True),
    Case("tied-z3-w2", _ONE2, 3, tied=True),
    Case("frozen-z1-w2", _ONE2, 1, frozen="embed_tokens"),
    Case("frozen-z2-w2", _ONE2, 2, "fp32", frozen="embed_tokens"),
    Case("frozen-z3-w2", _ONE2, 3, frozen="embed_tokens|layers.0.self_attn.q_proj"),
    Case("dealt-z1-w2", _ONE2, 1, model="odd", dealt=True),
    Case("dealt-z2-w4", _ONE4, 2, dealt=True),
    Case("elastic-z1-w2", _ONE2, 1, model="odd", elastic=True),
    Case("elastic-z2-w4", _ONE4, 2, "fp32", elastic=True),
    Case("bf16-optimizer-w2", _ONE2, 1, accumulate="fp32"),
    Case("bf16-optimizer-odd-w4", _ONE4, 1, model="odd", accumulate="fp32"),
    # DeepSpeed's own mixtures: experts over ranks.
    Case("ep2-z1-w2", _ONE2, 1, model="moe", ep=2),
    Case("ep2-z2-w4", _ONE4, 2, "fp32", model="moe", ep=2),
    Case("ep4-z1-w4", _ONE4, 1, model="moe", ep=4),
    Case("ep2-data-first-w4", _ONE4, 1, model="moe", ep=2, data_first=True),
    Case("ep1-z1-w2", _ONE2, 1, model="moe"),
    # Tensor parallel.
    Case("tp2-vocab251", _TP2, 1, vocab=251),
    Case("tp2-z2-fp32", _TP2, 2, "fp32"),
    Case("tp2-z3", _TP2, 3),
    Case("tp2-qwen2", _TP2, 1, "fp32", model="qwen2"),
    Case("tp2-tied", _TP2, 1, tied=True),
    Case("tp2-frozen-q", _TP2, 1, frozen="q_proj"),
    Case("tp2-frozen-q-z2", _TP2, 2, frozen="q_proj|embed_tokens"),
    Case("tp2-mqa", _TP2, 1, kv=1),
    Case("tp2-fused", _TP2, 1, model="fused"),
    Case("tp2-fused-fp32", _TP2, 2, "fp32", model="fused"),
    Case("tp2-embed-path", _TP2, 1, model="fused", blocks="embed_layers"),
    Case("tp2-wide", _TP2, 2, heads=8, kv=4),
    Case("tp2-wide-fused", _TP2, 1, model="fused", heads=8, kv=4),
    Case("tp2-uneven", _TP2, 1, hidden=48, heads=6, kv=2, vocab=251),
    Case("tp4", _TP4, 1, heads=8, kv=4),
    Case("tp4-uneven", _TP4, 1, hidden=48, heads=6, kv=2, vocab=251),
    Case("tp4-fused", _TP4, 1, model="fused", heads=8, kv=4),
    Case("tp2-dp2", _TP2DP2, 1, vocab=251),
    Case("tp2-dp2-z3", _TP2DP2, 3, "fp32"),
    Case("tp2-dp2-fused", _TP2DP2, 2, model="fused"),
    Case("tp2-head-rows", _TP2, 1, model="fused", tied=True, head_rows=True),
    # Tensor parallel, cut by us: key and value heads that ranks share, fused projections, biases, a tie.
    Case("ours-tp4", _TP4, 1, heads=8, kv=4, ours=True),
    Case("ours-tp4-uneven", _TP4, 1, "fp32", model="qwen2", hidden=48, heads=6, kv=2, vocab=251, ours=True),
    Case("ours-tp4-phi3", _TP4, 2, "fp32", model="phi3", hidden=48, heads=6, kv=2, vocab=251, ours=True),
    Case("ours-tp2", _TP2, 2, heads=8, kv=4, ours=True),
    Case("ours-tp2-uneven", _TP2, 1, "fp32", model="qwen2", hidden=48, heads=6, kv=2, vocab=251, ours=True),
    Case("ours-tp2-phi3", _TP2, 1, "fp32", model="phi3", hidden=48, heads=6, kv=2, vocab=251, ours=True),
    Case("ours-tp2-tied", _TP2, 1, vocab=251, tied=True, ours=True),
    Case("ours-tp2-dp2", _TP2DP2, 1, heads=8, kv=4, ours=True),
    Case("ours-tp2-dp2-z3", _TP2DP2, 3, heads=8, kv=4, ours=True),
    # Pipeline parallel.
    Case("pp2", _PP2, 1, model="pipe"),
    Case("pp2-tied", _PP2, 1, model="pipe", tied=True),
    Case("pp2-dp2", _PP2DP2, 1, model="pipe"),
    Case("pp2-tp2", _PP2TP2, 1, model="pipe"),
    Case("pp2-tp2-frozen", _PP2TP2, 1, "fp32", model="pipe", frozen="up|ln"),
)
UNSHARDED = (
    Case("z0-fp32-w2", _ONE2, 0, "fp32", model="odd"),
    Case("z0-bf16-w2", _ONE2, 0, model="odd"),
    Case("z0-moe-w2", _ONE2, 0, "fp32", model="moe", ep=2),
)
"""Without ZeRO: the optimizer's state has numbers, not names."""
BY_NAME = {case.name: case for case in (*CASES, *UNSHARDED)}

"""Sparse attention in training: an indexer scores all previous keys and selects `index_topk` of
them.
"""

from hp_tool.cost.arrays import Floats
from hp_tool.cost.block import Shapes, seen_keys
from hp_tool.cost.case import TrainingCase
from hp_tool.cost.matrices import attention_flops, has_indexer
from hp_tool.cost.roofline import additive_seconds, peak_flops, roofline_seconds
from hp_tool.cost.scans import index_flops, mixer_kernel, wide_precision
from hp_tool.domain.model import ModelSpec

SCORE_BYTES = 4.0
"""Bytes of an index score, which the top-k kernel reads."""
PLACE_BYTES = 4.0
"""Bytes of the index of a selected key."""
TIMED_PLACES = 2048.0
"""`index_topk` of the models whose sparse-attention modules were timed."""
INDEX_BACKWARD, CORE_BACKWARD = 2.0, 2.5
"""Time of the backward pass relative to the forward pass. Not measured.

Indexer: 2, because its loss depends on the scores of the core. Core: 2.5, for five matmuls instead
of two.
"""


def index_bytes(model: ModelSpec, s: Shapes) -> Floats:
    """Return the activation bytes of the indexer, which every rank replicates.

    These are its queries, key and weights, and the indices of the selected keys.
    """
    if model.index_topk is None:
        return 0.0
    heads, width = float(model.index_n_heads or 0), float(model.index_head_dim or 0)
    projected_bytes = s.e * (heads * width + width + heads) if has_indexer(model) else 0.0
    return s.tokens * (projected_bytes + PLACE_BYTES * model.index_topk)


def chosen_core_seconds(*, case: TrainingCase, s: Shapes) -> tuple[Floats, Floats]:
    """Return the (forward, backward) seconds of index scores, top-k, and attention over the
    selected keys.

    Uses the constants of kernels timed on prompts. On average, a token scores half of the sequence;
    at position i it attends to min(i, k) keys. Latent keys stay in the latent space. Gathering the
    k selected keys takes a fixed time per token.
    """
    model, gpu = case.model, case.cluster.gpu
    peak, length, most = (
        peak_flops(gpu, precision=wide_precision(gpu)),
        case.workload.computed_attention_length,
        float(model.index_topk or 0),
    )
    index: Floats = 0.0
    if has_indexer(model):
        pairs = s.tokens * 0.5 * length
        roof = mixer_kernel(case, model, "index")
        index = additive_seconds(
            pairs * index_flops(model), pairs * 2.0 * SCORE_BYTES, roof, gpu=gpu, peak=peak
        )
    roof = mixer_kernel(case, model, "attention")
    flops = s.tokens * 0.5 * seen_keys(most, length) * attention_flops(model, s.t, decoding=True)
    core = roofline_seconds(flops, 0.0, roof, gpu=gpu, peak=peak) + roof.token_s * s.tokens * (
        most / TIMED_PLACES
    )
    return index + core, INDEX_BACKWARD * index + CORE_BACKWARD * core

"""Attention over chosen keys in training: an indexer scores all keys before a token, the core sees
the best `index_topk`.
"""

from hp_tool.cost.arrays import Floats
from hp_tool.cost.block import Shapes, seen_keys
from hp_tool.cost.case import TrainingCase
from hp_tool.cost.matrices import attention_flops, has_indexer
from hp_tool.cost.roofline import additive_seconds, peak_flops, roofline_seconds
from hp_tool.cost.scans import index_flops, kernel, wide_precision
from hp_tool.domain.model import ModelSpec

SCORE_BYTES = 4.0
"""Bytes of an index score, which the top-k reads."""
PLACE_BYTES = 4.0
"""Bytes of a chosen key's place."""
TIMED_PLACES = 2048.0
"""`index_topk` of the models whose modules of sparse attention were timed."""
INDEX_BACKWARD, CORE_BACKWARD = 2.0, 2.5
"""Backward over forward: twice the work of the indexer, whose loss follows the core's scores; five
matmuls of the core against two. Nobody timed them.
"""


def index_bytes(model: ModelSpec, s: Shapes) -> Floats:
    """Activation bytes of the indexer, whole on every rank: its queries, key and weights, and the
    places of the chosen keys.
    """
    if model.index_topk is None:
        return 0.0
    heads, width = float(model.index_n_heads or 0), float(model.index_head_dim or 0)
    own = s.e * (heads * width + width + heads) if has_indexer(model) else 0.0
    return s.tokens * (own + PLACE_BYTES * model.index_topk)


def chosen_core_seconds(*, case: TrainingCase, s: Shapes) -> tuple[Floats, Floats]:
    """(forward, backward) seconds of index scores with their top-k and of attention over the chosen
    keys, by the kernels timed over prompts.

    A token scores half of the sequence on average, and attends to min(i, k) keys at place i; latent
    keys in the latent space. Going through the places of all k takes a token's time.
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
        roof = kernel(case, model, "index")
        index = additive_seconds(
            pairs * index_flops(model), pairs * 2.0 * SCORE_BYTES, roof, gpu=gpu, peak=peak
        )
    roof = kernel(case, model, "attention")
    flops = s.tokens * 0.5 * seen_keys(most, length) * attention_flops(model, s.t, decoding=True)
    core = roofline_seconds(flops, 0.0, roof, gpu=gpu, peak=peak) + roof.token_s * s.tokens * (
        most / TIMED_PLACES
    )
    return index + core, INDEX_BACKWARD * index + CORE_BACKWARD * core

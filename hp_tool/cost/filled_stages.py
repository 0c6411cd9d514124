"""Split a model into pipeline stages of equal weight instead of equal numbers of layers, as
nanotron does.
"""

import functools
from typing import Any, NamedTuple

import numpy as np

from hp_tool.cost.arrays import Ints
from hp_tool.domain.model import ModelSpec

TAIL_BLOCKS = 2
"""Number of blocks with weight 0 after the output layer: the cast to fp32 and the loss."""


class Split(NamedTuple):
    """How a model's blocks are split across the stages."""

    first: int
    """Number of layers on the first stage."""
    most: int
    """Largest number of layers on a stage."""
    output: int
    """Number of layers on the stage that has the output layer."""
    output_from_end: int
    """Number of stages after the one with the output layer. These stages have only the loss, or no
    block.
    """
    empty: int
    """Number of stages without a block. The framework does not start if any stage is empty."""


@functools.lru_cache(maxsize=4096)
def split_summary(*, layers: int, layer_weight: float, output_weight: float, stages: int) -> Split:
    """Return a Split that summarises the stages of `fill_stages`."""
    counts, blocks, output_at = fill_stages(
        layers=layers, layer_weight=layer_weight, output_weight=output_weight, stages=stages
    )
    return Split(
        first=counts[0],
        most=max(counts),
        output=counts[output_at],
        output_from_end=stages - 1 - output_at,
        empty=blocks.count(0),
    )


def fill_stages(
    *, layers: int, layer_weight: float, output_weight: float, stages: int
) -> tuple[list[int], list[int], int]:
    """Return (layers of each stage, blocks of each stage, index of the stage with the output
    layer).

    Blocks in order: embedding (weight 0), layers, final norm (0), output layer, cast and loss (0).
    Blocks are assigned in order. Stage r ends with the first block at which the cumulative weight
    exceeds (r + 1)/p of the total.

    Source: nanotron, models/base.py build_model; models/llama.py get_block_compute_costs.
    """
    weights = [0.0, *[layer_weight] * layers, 0.0, output_weight, *[0.0] * TAIL_BLOCKS]
    total, running, stage = sum(weights), 0.0, 0
    counts, blocks, output_at = [0] * stages, [0] * stages, 0
    for index, weight in enumerate(weights):
        running += weight
        blocks[stage] += 1
        counts[stage] += 1 <= index <= layers
        if index == layers + 2:
            output_at = stage
        if running > total * ((stage + 1) / stages) and stage < stages - 1:
            stage += 1
    return counts, blocks, output_at


def stage_contents(model: ModelSpec, stages: int) -> tuple[list[int], int]:
    """Return (layers of each stage, index of the stage with the output layer)."""
    layer_weight, output_weight = _block_weights(model)
    counts, _, output_at = fill_stages(
        layers=model.num_hidden_layers,
        layer_weight=layer_weight,
        output_weight=output_weight,
        stages=stages,
    )
    return counts, output_at


def split_candidates(model: ModelSpec, stages: Ints) -> Split:
    """Return the split for each candidate's number of stages. If `stages` is an array, the fields
    are arrays too.
    """
    layer_weight, output_weight = _block_weights(model)
    of = functools.partial(
        split_summary,
        layers=model.num_hidden_layers,
        layer_weight=layer_weight,
        output_weight=output_weight,
    )
    if not isinstance(stages, np.ndarray):
        return of(stages=int(stages))
    sizes, inverse = np.unique(stages, return_inverse=True)
    table = np.array([of(stages=int(p)) for p in sizes], dtype=np.int64).reshape(
        len(sizes), len(Split._fields)
    )
    columns: Any = (column[inverse].reshape(stages.shape) for column in table.T)
    return Split(*columns)


def _block_weights(model: ModelSpec) -> tuple[float, float]:
    """Return the weights of (a layer, the output layer) as the framework counts them.

    The framework counts four square projections, even with grouped heads, and three MLP matrices.
    """
    width = model.num_attention_heads * model.head_size
    return float(model.hidden_size * (4 * width + 3 * model.ffn_size)), float(
        model.vocab_size * model.hidden_size
    )

"""How many layers the ends of a pipeline hold fewer than its other stages, where these cannot all hold equally many.

With v model chunks a rank Megatron Core can count embedding and output layer as a layer each (account_for_embedding_in_
pipeline_split, account_for_loss_in_pipeline_split), as Llama 3.1 405B is trained; with one chunk it takes any number for either
end (num_layers_in_first_pipeline_stage, num_layers_in_last_pipeline_stage), as NeMo's recipe trains the 61 layers of
DeepSeek-V3 on 16 stages: 3, fourteen times 4, and 2.
"""

from __future__ import annotations

from typing import Any


def missing_layers(*, num_layers: Any, stages: Any, chunks: Any) -> tuple[Any, Any]:
    """(on the first, on the last stage), each a number or an array as the sizes are. The last one, which has the output layer
    too, holds the fewest. Both are 0 where p v divides L. Of a split that `splits_unevenly` does not allow it means nothing.
    """
    even = num_layers % (stages * chunks) == 0
    # One chunk: up to the next multiple of p. Several: L + 2 is one, and so is L, or neither.
    missing = (chunks == 1) * (-num_layers % stages) + (chunks > 1) * (1 - even) * 2
    return missing // 2, missing - missing // 2


def splits_unevenly(*, num_layers: Any, stages: Any, chunks: Any) -> Any:
    """Whether shorter ends make it a pipeline: on a power of two of stages (other sizes are rather mistakes), with a layer or
    more on each.
    """
    p = stages
    with_ends = (num_layers + 2) % (p * chunks) == 0
    _, last = missing_layers(num_layers=num_layers, stages=p, chunks=1)
    shorter = (chunks == 1) & ((num_layers + p - 1) // p > last)
    return (p > 1) & ((p & (p - 1)) == 0) & (with_ends | shorter)


def chunk_layers(*, num_layers: int, stages: int, chunks: int) -> list[int]:
    """Layers of each of the p v model chunks, in the order in which a micro-batch passes them."""
    first, last = missing_layers(num_layers=num_layers, stages=stages, chunks=chunks)
    count = stages * chunks
    each = (num_layers + first + last) // count
    held = [each] * count
    held[0] -= first
    held[-1] -= last
    return held

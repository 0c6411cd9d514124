"""Flags of Megatron-LM that give the ends of a pipeline fewer layers, as a pipeline layout."""

from __future__ import annotations

from typing import Protocol

from hp_tool.domain.pipeline_split import chunk_layers
from hp_tool.errors import InputError
from hp_tool.formats.megatron_lm.words import FIRST_STAGE, LAST_STAGE, WITH_EMBEDDING, WITH_LOSS


class GivenFlags(Protocol):
    """Flags with typed access."""

    def on(self, *names: str) -> bool: ...
    def number(self, name: str, default: int | None = None) -> int: ...


def layout(given: GivenFlags, *, stages: int, chunks: int) -> str | None:
    """What each model chunk holds in the notation of `domain.pipeline_layout`; None where it is what a query that says nothing
    gets. Raises InputError where the flags do not divide the layers.
    """
    if not given.on(FIRST_STAGE, LAST_STAGE, WITH_EMBEDDING, WITH_LOSS):
        return None
    layers = given.number("num-layers")
    held = _stage_sizes(given, layers, stages, chunks) if given.on(FIRST_STAGE, LAST_STAGE) else None
    if held is None:  # embedding and output layer count as a layer each, so their chunks hold one fewer
        first, last = int(given.on(WITH_EMBEDDING)), int(given.on(WITH_LOSS))
        held = [(layers + first + last) // (stages * chunks)] * (stages * chunks)
        held[0] -= first
        held[-1] -= last
    if sum(held) != layers or min(held) < 0:
        raise InputError(
            f"--num-layers {layers} cannot be split over {stages} stages of {chunks} chunks with the ends that the command "
            f"asks for: chunks of {max(held)}, {held[0]} and {held[-1]} layers make {sum(held)}",
            field="--num-layers",
        )
    if held == chunk_layers(num_layers=layers, stages=stages, chunks=chunks):
        return None
    texts = [f"t*{count}" if count else "" for count in held]
    return f"E{'|'.join(texts)}{'m' * given.number('mtp-num-layers', 0)}L"


def _stage_sizes(given: GivenFlags, layers: int, stages: int, chunks: int) -> list[int]:
    """Chunks of a stage hold equally many (get_num_layers_to_build of Megatron Core); what is not given is shared out."""
    said = {0: FIRST_STAGE, stages - 1: LAST_STAGE}
    fixed = {rank: given.number(name) for rank, name in said.items() if given.on(name)}
    others = max(stages - len(fixed), 1)
    rest = (layers - sum(fixed.values())) // others
    return [fixed.get(rank, rest) // chunks for _ in range(chunks) for rank in range(stages)]

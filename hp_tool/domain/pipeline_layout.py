"""Uneven pipelines in Megatron Core's notation (--pipeline-model-parallel-layout): `Et*3|(tt|)*29,m|L`.

A `|` ends a model chunk. E is the embedding, t a transformer layer, m a multi-token-prediction layer, L the output layer with
the loss; `x*n` and `(...)*n` repeat, commas are ornament. Chunk i is on pipeline rank i mod p. Source: Megatron Core,
transformer/pipeline_parallel_layer_layout.py.
"""

import functools
import re
from dataclasses import dataclass

from hp_tool.errors import InputError

FIELD = "parallel.pipeline_layout"
MAX_TEXT = 4_096
MAX_WRITTEN_OUT = 65_536
"""Characters once all repetitions are written out."""
_REPETITIONS = (re.compile(r"\(([^()]+)\)\*(\d+)"), re.compile(r"([^*()\d])\*(\d+)"))
"""Groups first, so that what stands in them may repeat too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutChunk:
    """What one model chunk holds, in numbers."""

    embedding: int
    layers: int
    mtp_layers: int
    """Multi-token-prediction layers."""
    loss: int
    layers_before: int
    """Layers in the chunks before it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineLayout:
    """A well-formed layout; `check_layout` compares it with a model."""

    text: str
    chunks: tuple[LayoutChunk, ...]
    """In the order in which a micro-batch passes them."""

    def stage(self, rank: int, *, stages: int) -> tuple[LayoutChunk, ...]:
        """The chunks of one rank of a pipeline of that many."""
        return self.chunks[rank::stages]


@functools.lru_cache(maxsize=256)
def parse_layout(text: str) -> PipelineLayout:
    """The layout that a text describes. Raises InputError if it describes none, or too large a one."""
    if len(text) > MAX_TEXT:
        raise InputError(f"a pipeline layout may be {MAX_TEXT:,} characters long, this is {len(text):,}", field=FIELD)
    written = _written_out(text.replace(",", ""))
    if strange := re.search(r"[^EtmL|]", written):
        raise InputError(
            f"{strange.group()!r} is no part of a pipeline layout; write E, t, m, L, |, x*n and (...)*n", field=FIELD
        )
    if re.fullmatch(r"E[t|]*[m|]*L", written) is None:
        raise InputError(
            "a pipeline layout starts with its one E and ends with its one L, transformer layers (t) before "
            "multi-token-prediction layers (m)",
            field=FIELD,
        )
    chunks, before = [], 0
    for marks in written.split("|"):
        embedding, layers, mtp_layers, loss = map(marks.count, "EtmL")
        chunks.append(LayoutChunk(embedding=embedding, layers=layers, mtp_layers=mtp_layers, loss=loss, layers_before=before))
        before += layers
    if sum(chunk.mtp_layers > 0 for chunk in chunks) > 1:
        raise InputError("all multi-token-prediction layers (m) must be in one model chunk", field=FIELD)
    return PipelineLayout(text=text, chunks=tuple(chunks))


def check_layout(layout: PipelineLayout, *, num_layers: int, mtp_layers: int) -> None:
    """Raises InputError where it lays out another number of layers than the model has."""
    for count, wanted, letter, name in (
        (sum(chunk.layers for chunk in layout.chunks), num_layers, "t", "num_hidden_layers"),
        (sum(chunk.mtp_layers for chunk in layout.chunks), mtp_layers, "m", "num_nextn_predict_layers"),
    ):
        if count != wanted:
            raise InputError(f"{layout.text!r} has {count} x {letter}, the model's {name} is {wanted}", field=FIELD)


def _written_out(text: str) -> str:
    for pattern in _REPETITIONS:
        # Seven digits are too many of anything.
        length = len(text) + sum(len(match[1]) * int(match[2].lstrip("0")[:7] or 0) for match in pattern.finditer(text))
        if length > MAX_WRITTEN_OUT:
            raise InputError(f"a pipeline layout may stand for {MAX_WRITTEN_OUT:,} layers and marks at most", field=FIELD)
        text = pattern.sub(lambda match: match[1] * int(match[2]), text)
    return text

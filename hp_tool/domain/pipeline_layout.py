"""Uneven pipelines in Megatron Core's notation (--pipeline-model-parallel-layout):
`Et*3|(tt|)*29,m|L`.

A `|` ends a model chunk. E is the embedding, t a transformer layer, m a multi-token-prediction
layer, and L the output layer with the loss. `x*n` and `(...)*n` are repetitions; commas are
ignored. Chunk i is on pipeline rank i mod p. Source: Megatron Core,
transformer/pipeline_parallel_layer_layout.py.
"""

import functools
import itertools
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from hp_tool.errors import InputError

LAYOUT_PATH = "parallel.pipeline_layout"
MAX_TEXT = 4_096
MAX_EXPANDED_CHARACTERS = 65_536
"""Maximum number of characters after all repetitions are expanded."""
_REPETITIONS = (re.compile(r"\(([^()]+)\)\*(\d+)"), re.compile(r"([^*()\d])\*(\d+)"))
"""Regular expressions for repetitions. Groups are expanded first, so that their content may contain
repetitions.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutChunk:
    """Contents of one model chunk."""

    embedding: int
    layers: int
    mtp_layers: int
    """Number of multi-token-prediction layers."""
    loss: int
    layers_before: int
    """Number of layers in earlier chunks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineLayout:
    """A well-formed layout; `check_layout` compares it with a model."""

    text: str
    chunks: tuple[LayoutChunk, ...]
    """Chunks in the order in which a micro-batch passes through them."""

    def stage(self, rank: int, *, stages: int) -> tuple[LayoutChunk, ...]:
        """Return the chunks on one rank of a pipeline with `stages` ranks."""
        return self.chunks[rank::stages]


@functools.lru_cache(maxsize=256)
def parse_layout(text: str) -> PipelineLayout:
    """Return the layout described by a text.

    Raises:
        InputError: The text is not a layout, or the layout is too large.
    """
    if len(text) > MAX_TEXT:
        raise InputError(
            f"the pipeline layout has {len(text):,} characters; the maximum is {MAX_TEXT:,}",
            field=LAYOUT_PATH,
        )
    written = _expand_repetitions(text.replace(",", ""))
    if strange := re.search(r"[^EtmL|]", written):
        raise InputError(
            f"{strange.group()!r} is not valid in a pipeline layout; use E, t, m, L, |, "
            "x*n and (...)*n",
            field=LAYOUT_PATH,
        )
    if re.fullmatch(r"E[t|]*[m|]*L", written) is None:
        raise InputError(
            "a pipeline layout must start with E and end with L, with transformer "
            "layers (t) before multi-token-prediction layers (m)",
            field=LAYOUT_PATH,
        )
    chunks, before = [], 0
    for marks in written.split("|"):
        embedding, layers, mtp_layers, loss = map(marks.count, "EtmL")
        chunks.append(
            LayoutChunk(
                embedding=embedding,
                layers=layers,
                mtp_layers=mtp_layers,
                loss=loss,
                layers_before=before,
            )
        )
        before += layers
    if sum(chunk.mtp_layers > 0 for chunk in chunks) > 1:
        raise InputError(
            "all multi-token-prediction layers (m) must be in one model chunk", field=LAYOUT_PATH
        )
    return PipelineLayout(text=text, chunks=tuple(chunks))


def check_layout(layout: PipelineLayout, *, num_layers: int, mtp_layers: int) -> None:
    """Check that a layout has the model's number of layers.

    Raises:
        InputError: The layout has a different number of layers.
    """
    for count, wanted, letter, name in (
        (sum(chunk.layers for chunk in layout.chunks), num_layers, "t", "num_hidden_layers"),
        (
            sum(chunk.mtp_layers for chunk in layout.chunks),
            mtp_layers,
            "m",
            "num_nextn_predict_layers",
        ),
    ):
        if count != wanted:
            raise InputError(
                f"{layout.text!r} has {count} x {letter}, but the model's {name} is {wanted}",
                field=LAYOUT_PATH,
            )


def _expand_repetitions(text: str) -> str:
    for pattern in _REPETITIONS:
        # A number with more than seven digits is always too large.
        length = len(text) + sum(
            len(match[1]) * int(match[2].lstrip("0")[:7] or 0) for match in pattern.finditer(text)
        )
        if length > MAX_EXPANDED_CHARACTERS:
            raise InputError(
                "the pipeline layout expands to more than the maximum of "
                f"{MAX_EXPANDED_CHARACTERS:,} layers and separators",
                field=LAYOUT_PATH,
            )
        text = pattern.sub(lambda match: match[1] * int(match[2]), text)
    return text


# Default numbers of layers per stage if p v does not divide L: L layers, p stages, v chunks per
# stage. Sizes are numbers or arrays.
#
# Megatron Core can count the output layer, or both it and the embedding, as one layer each
# (account_for_loss_in_pipeline_split, account_for_embedding_in_pipeline_split): BLOOM's 70 layers
# are on 12 stages, the 126 of Llama 3.1 405B on 64 chunks. With one chunk per rank, it accepts any
# number for the first and the last stage (num_layers_in_first_pipeline_stage,
# num_layers_in_last_pipeline_stage). MoE models that begin with dense layers, which are fast, have
# a full first chunk: Megatron Bridge divides the 61 layers of DeepSeek-V3 and Kimi-K2 into 15
# chunks of 4 and one of 1 (recipes/deepseek, recipes/kimi). In all other cases, each of the first
# and the last few chunks has one layer fewer.


def missing_layers(
    *, num_layers: Any, stages: Any, chunks: Any, begins_dense: bool = False
) -> tuple[Any, Any]:
    """Return how many layers the first and the last stage lack compared with a full stage.

    The sum of both is the distance from L to the next multiple of p v, which is 0 if p v divides L.
    The last stage lacks more layers, because it also has the output layer. With `begins_dense`,
    only the last stage lacks layers, provided that it keeps at least one.
    """
    missing = -num_layers % (stages * chunks)
    first = missing // 2
    if begins_dense:
        first = first * (missing >= -(-num_layers // (stages * chunks)))
    return first, missing - first


def ends_are_shorter(
    *, num_layers: Any, stages: Any, chunks: Any, begins_dense: bool = False
) -> Any:
    """Return whether Megatron Core's settings for the first and the last stage are sufficient to
    describe the layers of all stages.

    They are if both stages lack at most one layer or, with one chunk per rank, if the last stage
    has at least one layer.
    """
    _, last = missing_layers(
        num_layers=num_layers, stages=stages, chunks=chunks, begins_dense=begins_dense
    )
    return (last <= 1) | ((chunks == 1) & (last < -(-num_layers // stages)))


def _only_ends_lack_layers(*, num_layers: Any, stages: Any, chunks: Any, begins_dense: bool) -> Any:
    """Return whether all stages except the first and the last are full, even if Megatron Core has
    no setting for this.
    """
    sizes = {
        "num_layers": num_layers,
        "stages": stages,
        "chunks": chunks,
        "begins_dense": begins_dense,
    }
    first, last = missing_layers(**sizes)
    return ends_are_shorter(**sizes) | (begins_dense & (first == 0) & (last > 0))


def splits_unevenly(*, num_layers: Any, stages: Any, chunks: Any) -> Any:
    """Return whether L layers can be split unevenly into p v chunks, where every chunk except
    possibly the first and the last has a layer.
    """
    _, last = missing_layers(num_layers=num_layers, stages=stages, chunks=chunks)
    return (stages > 1) & ((num_layers > stages * chunks) | ((chunks > 1) & (last == 1)))


def stage_layers(
    *, num_layers: Any, stages: Any, chunks: Any, late: bool = False, begins_dense: bool = False
) -> tuple[Any, Any, Any]:
    """Return the numbers of layers on the first, the last and the fullest stage. For `late`, see
    `chunk_layers`.
    """
    p = stages
    if late:
        return num_layers // p, -(-num_layers // p), -(-num_layers // p)
    first, last = missing_layers(
        num_layers=num_layers, stages=p, chunks=chunks, begins_dense=begins_dense
    )
    full = -(-num_layers // (p * chunks)) * chunks
    ends = _only_ends_lack_layers(
        num_layers=num_layers, stages=p, chunks=chunks, begins_dense=begins_dense
    )
    # Chunk i is on rank i mod p, so if p consecutive chunks lack a layer each, every stage has one
    # of them.
    rounds, (begun, ended) = first // p + last // p, (first % p, last % p)
    spread = (rounds + (begun > 0), rounds + (ended > 0), rounds + (begun + ended >= p))
    return tuple(
        full - (ends * short + (1 - ends) * scattered)
        for short, scattered in zip((first, last, first * (p == 2)), spread, strict=True)
    )


def v_stage_layers(
    *, num_layers: Any, stages: Any, chunks: Any, begins_dense: bool = False
) -> tuple[Any, Any, Any]:
    """Return the numbers of layers on the first, the last and the fullest stage of a V-shaped
    pipeline, where rank r has the chunks r and 2p - 1 - r.
    """
    first, last = missing_layers(
        num_layers=num_layers, stages=stages, chunks=chunks, begins_dense=begins_dense
    )
    full = -(-num_layers // (stages * chunks)) * chunks
    alone = begins_dense & (first == 0) & (last > 0)  # The last chunk lacks all of them.
    most = full - (1 - alone) * ((first >= stages) * 1 + (last >= stages))
    return full - (first > 0) - ((1 - alone) * (last > 0) + alone * last), most, most


def chunk_layers(
    *, num_layers: int, stages: int, chunks: int, late: bool = False, begins_dense: bool = False
) -> list[int]:
    """Return the number of layers in each of the p v model chunks, in the order in which a
    micro-batch passes through them.

    With `late`, the last chunks get the remaining layers.
    """
    first, last = missing_layers(
        num_layers=num_layers, stages=stages, chunks=chunks, begins_dense=begins_dense
    )
    count = stages * chunks
    if late:
        return [
            num_layers // count + (place >= count - num_layers % count) for place in range(count)
        ]
    sizes = [(num_layers + first + last) // count] * count
    if _only_ends_lack_layers(
        num_layers=num_layers, stages=stages, chunks=chunks, begins_dense=begins_dense
    ):
        sizes[0] -= first
        sizes[-1] -= last
        return sizes
    return [layers - (place < first or place >= count - last) for place, layers in enumerate(sizes)]


@functools.lru_cache(maxsize=1024)
def layout_text(
    *, num_layers: int, mtp_layers: int, stages: int, chunks: int, begins_dense: bool = False
) -> str:
    """Return the split computed by `chunk_layers` in this module's notation:
    `Et*5|(t*6|)*10t*5L`.
    """
    return text_of_chunks(
        chunk_layers(
            num_layers=num_layers, stages=stages, chunks=chunks, begins_dense=begins_dense
        ),
        mtp_layers=mtp_layers,
    )


def text_of_chunks(sizes: Iterable[int], *, mtp_layers: int) -> str:
    """Return two or more model chunks with these numbers of layers in the same notation.
    Multi-token prediction is in the last chunk.
    """
    first, *between, last = map(_layers_text, sizes)
    runs = ((text, len(list(same))) for text, same in itertools.groupby(between))
    middle = "".join(f"({text}|)*{times}" if times > 1 else f"{text}|" for text, times in runs)
    return f"E{first}|{middle}{last}{'m' * mtp_layers}L"


def _layers_text(count: int) -> str:
    return f"t*{count}" if count > 2 else "t" * count

"""The part of a pipeline that one kind of GPU holds, where a cluster has two kinds."""

from __future__ import annotations

import functools
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np

from hp_tool.cost.arrays import Floats, Ints, anywhere, maximum, minimum, where
from hp_tool.cost.candidates import DUALPIPE, ZBV, Candidates
from hp_tool.cost.schedules.bubble import is_folded
from hp_tool.domain.frameworks import facts
from hp_tool.domain.model import ModelSpec
from hp_tool.domain.pipeline_split import missing_layers


@dataclass(frozen=True, slots=True, kw_only=True)
class Section(Candidates):
    """Candidates of which only `stages` neighbouring pipeline stages are looked at, each with `layers` layers."""

    stages_before: Floats
    layers_before: Floats
    stages: Floats
    layers: Floats
    holds_embedding: Floats
    """Its first stage is the pipeline's."""
    holds_output: Floats
    """Its last stage is the pipeline's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage(Section):
    """A section of one stage, of a pipeline that is laid out by hand."""

    dense_layers: Floats
    """Of `layers`, those without experts in a model that has them."""
    extra_layers: Floats
    """Multi-token-prediction layers, beside `layers`."""
    embeddings: Floats
    """Copies of the embedding: multi-token prediction wants one on its own stage too (Megatron Core, gpt_model.py)."""
    chunk_layers: Floats
    """Layers a model chunk, the mean over those whose activations the stage holds at its fullest."""


def section(candidates: Candidates, **said: Any) -> Section:
    """The section of each candidate."""
    columns = {f.name: getattr(candidates, f.name) for f in fields(Candidates)}
    return Section(**columns, **said)


# Pipeline stages filled by weight instead of by number of layers, as nanotron fills them.


TAIL_BLOCKS = 2
"""Blocks without weights after the output layer: the cast to fp32 and the loss."""


class Split(NamedTuple):
    """Where the blocks of a model are, for one number of stages."""

    first: int
    """Layers on the first stage."""
    most: int
    """Layers on the stage that has most."""
    output: int
    """Layers on the stage that has the output layer."""
    output_from_end: int
    """Stages after the one that has the output layer: the loss, or nothing, is on them."""
    empty: int
    """Stages without any block: the framework cannot start with them."""


@functools.lru_cache(maxsize=4096)
def split(*, layers: int, layer_weight: float, output_weight: float, stages: int) -> Split:
    """The split of `filled` in a few numbers."""
    held, blocks, output_at = filled(layers=layers, layer_weight=layer_weight, output_weight=output_weight, stages=stages)
    return Split(
        first=held[0], most=max(held), output=held[output_at], output_from_end=stages - 1 - output_at, empty=blocks.count(0)
    )


def filled(*, layers: int, layer_weight: float, output_weight: float, stages: int) -> tuple[list[int], list[int], int]:
    """(layers of each stage, blocks of each stage, the stage with the output layer).

    Blocks in order: embedding (weight 0), layers, final norm (0), output layer, cast and loss (0). A stage is closed by
    the block with which the running sum exceeds its share, (r + 1)/p of the total: that block is still on it.

    Source: nanotron, models/base.py build_model; models/llama.py get_block_compute_costs.
    """
    weights = [0.0, *[layer_weight] * layers, 0.0, output_weight, *[0.0] * TAIL_BLOCKS]
    total, running, stage = sum(weights), 0.0, 0
    held, blocks, output_at = [0] * stages, [0] * stages, 0
    for index, weight in enumerate(weights):
        running += weight
        blocks[stage] += 1
        held[stage] += 1 <= index <= layers
        if index == layers + 2:
            output_at = stage
        if running > total * ((stage + 1) / stages) and stage < stages - 1:
            stage += 1
    return held, blocks, output_at


def stage_contents(model: ModelSpec, stages: int) -> tuple[list[int], int]:
    """(layers of each stage, the stage with the output layer)."""
    layer_weight, output_weight = _weights(model)
    held, _, output_at = filled(
        layers=model.num_hidden_layers, layer_weight=layer_weight, output_weight=output_weight, stages=stages
    )
    return held, output_at


def splits(model: ModelSpec, stages: Ints) -> Split:
    """The split of each candidate's number of stages; every field an array where `stages` is one."""
    layer_weight, output_weight = _weights(model)
    of = functools.partial(split, layers=model.num_hidden_layers, layer_weight=layer_weight, output_weight=output_weight)
    if not isinstance(stages, np.ndarray):
        return of(stages=int(stages))
    sizes, kind_of = np.unique(stages, return_inverse=True)
    table = np.array([of(stages=int(p)) for p in sizes], dtype=np.int64).reshape(len(sizes), len(Split._fields))
    columns: Any = (column[kind_of].reshape(stages.shape) for column in table.T)
    return Split(*columns)


def _weights(model: ModelSpec) -> tuple[float, float]:
    """(a layer's, the output layer's) weight as the framework counts it: four square projections even with grouped heads, and
    three MLP matrices.
    """
    width = model.num_attention_heads * model.head_size
    return float(model.hidden_size * (4 * width + 3 * model.ffn_size)), float(model.vocab_size * model.hidden_size)


# Which layers the pipeline's stages hold.


NO_LAYERS = 1e-9
"""Layers of a stage that holds none: formulas ask for seconds a layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """Layers on one end of the pipeline; shape (n,)."""

    layers: Floats
    """Multi-token-prediction layers of the last stage included."""
    moe_fraction: Floats
    """Share of the layers that have experts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLayers:
    """L/p layers on each stage; the leading dense layers of a mixture-of-experts model are on the first. Where p v does not
    divide L, the ends hold fewer, see `domain.pipeline_split`.
    """

    pace: Floats
    """Layers of the stage that sets the pace: one between the ends, where there is one."""
    first: End
    last: End
    pace_moe_fraction: Floats
    """Share of layers with experts on the stage that sets the pace."""
    fewer_first: Floats
    """Layers by which the first stage has fewer than the pace."""
    fewer_last: Floats
    """The same of the stage with the output layer."""
    fewer: Floats | Ints
    """The same of all stages together."""
    output_from_end: Floats = 0
    """Stages behind the one that has the output layer."""


def stage_layers(model: ModelSpec, candidates: Candidates, *, framework: str) -> StageLayers:
    """The layers of both ends."""
    if isinstance(candidates, Section):
        return _section_layers(model, candidates) if not isinstance(candidates, Stage) else _only_stage(model, candidates)
    p = candidates.pipeline_parallel_size
    if facts(framework).balances_blocks:
        return _balanced_layers(model, p)
    fewer_first, fewer_last = missing_layers(
        num_layers=model.total_layers, stages=p, chunks=candidates.virtual_pipeline_parallel_size
    )
    fewer = fewer_first + fewer_last
    each = (model.total_layers + fewer) / p
    extra = model.num_nextn_predict_layers
    # Multi-token prediction goes with the output layer, which ZB-V has on its first rank.
    on_v = extra * (candidates.pipeline_schedule == ZBV) if extra else 0
    first, last = each - fewer_first + ((p == 1) * extra + on_v), each - fewer_last + (extra - on_v)
    if not model.num_experts:
        ends = [End(layers=layers, moe_fraction=0.0) for layers in (first, last)]
        return StageLayers(
            pace=each, first=ends[0], last=ends[1], pace_moe_fraction=0.0,
            fewer_first=fewer_first, fewer_last=fewer_last, fewer=fewer,
        )  # fmt: skip
    dense = model.total_layers - model.moe_layers
    on_first = minimum(dense, each - fewer_first)
    on_last = maximum(dense - (model.total_layers - each + fewer_last), 0.0)
    ends = [End(layers=n, moe_fraction=1.0 - d / maximum(n, NO_LAYERS)) for n, d in ((first, on_first), (last, on_last))]
    # A stage between the ends holds the fewest of the leading dense layers.
    between = 1.0 - maximum(dense - (each - fewer_first), 0.0) / each
    pace = where(p > 2, maximum(between, 0.0), maximum(ends[0].moe_fraction, ends[1].moe_fraction))
    return StageLayers(
        pace=each, first=ends[0], last=ends[1], pace_moe_fraction=pace,
        fewer_first=fewer_first, fewer_last=fewer_last, fewer=fewer,
    )  # fmt: skip


def _balanced_layers(model: ModelSpec, p: Ints) -> StageLayers:
    """Dense layers and the output layer, split by weight."""
    found = splits(model, p)
    return StageLayers(
        pace=found.most,
        first=End(layers=found.first, moe_fraction=0.0),
        last=End(layers=found.output, moe_fraction=0.0),
        pace_moe_fraction=0.0,
        fewer_first=found.most - found.first,
        fewer_last=found.most - found.output,
        fewer=p * found.most - model.num_hidden_layers,
        output_from_end=found.output_from_end,
    )


def _section_layers(model: ModelSpec, c: Section) -> StageLayers:
    """The same of a section of the pipeline: its own first and last stage."""
    extra = model.num_nextn_predict_layers if c.holds_output else 0
    alone = c.stages == 1
    layers = (c.layers + alone * extra, c.layers + extra)
    dense = (model.num_hidden_layers - model.moe_layers) if model.num_experts else 0
    ends = []
    for stage, held in zip((0, c.stages - 1), layers, strict=True):
        leading = minimum(maximum(dense - (c.layers_before + stage * c.layers), 0.0), c.layers)
        ends.append(End(layers=held, moe_fraction=1.0 - leading / held if model.num_experts else 0.0))
    return StageLayers(
        pace=c.layers, first=ends[0], last=ends[1], pace_moe_fraction=ends[1].moe_fraction,
        fewer_first=0, fewer_last=0, fewer=0,
    )  # fmt: skip


def _only_stage(model: ModelSpec, c: Stage) -> StageLayers:
    """The same of one stage of a pipeline that is laid out: it is both ends."""
    layers = c.layers + c.extra_layers
    share = 1.0 - c.dense_layers / maximum(layers, 1) if model.num_experts else 0.0
    both = End(layers=layers, moe_fraction=share)
    return StageLayers(
        pace=maximum(layers, NO_LAYERS), first=both, last=both, pace_moe_fraction=share, fewer_first=0, fewer_last=0, fewer=0
    )


# The two ranks on which memory may be worst: their place in the pipeline, their layers, and the model's ends they hold.


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineEnd:
    """One end of each candidate's pipeline, or of its section; shape (n,) or the same for all."""

    rank: Floats
    """0-based, in the whole pipeline."""
    layers: Floats
    chunk_layers: Floats
    """Layers of one model chunk whose activations it holds."""
    holds_embedding: Floats
    """1 or 0."""
    holds_output: Floats
    """1 or 0: output layer and loss."""


def pipeline_ends(candidates: Candidates, *, stages: StageLayers) -> tuple[PipelineEnd, PipelineEnd]:
    """The rank with the first stage and the one with the output layer. Without a pipeline they are one and the same; where
    it is folded, both ends of the model are on the first rank, in DualPipe on the last one too.
    """
    c, p = candidates, candidates.pipeline_parallel_size
    first, last = stages.first.layers, stages.last.layers
    chunks = c.virtual_pipeline_parallel_size
    chunk_first, chunk_last = (c.chunk_layers,) * 2 if isinstance(c, Stage) else (first / chunks, last / chunks)
    before: Floats = 0
    behind: Floats = stages.output_from_end
    embedding: tuple[Floats, Floats]
    output: tuple[Floats, Floats]
    if isinstance(c, Section):
        before, behind = c.stages_before, behind + (p - c.stages_before - c.stages)
        one_stage = c.stages == 1
        embedding = c.holds_embedding, one_stage * c.holds_embedding
        output = one_stage * c.holds_output, c.holds_output
    elif anywhere(c.pipeline_schedule):
        embedding = True, (p == 1) | (c.pipeline_schedule == DUALPIPE)
        output = (p == 1) | is_folded(c), c.pipeline_schedule != ZBV
    else:
        embedding, output = (True, p == 1), (p == 1, True)
    return (
        PipelineEnd(rank=before, layers=first, chunk_layers=chunk_first, holds_embedding=embedding[0], holds_output=output[0]),
        PipelineEnd(
            rank=p - 1 - behind, layers=last, chunk_layers=chunk_last, holds_embedding=embedding[1], holds_output=output[1]
        ),
    )

"""Which layers the pipeline's stages hold."""

from __future__ import annotations

from dataclasses import dataclass

from hp_tool.cost.balanced import splits
from hp_tool.cost.candidates import ZBV, Candidates
from hp_tool.cost.elementwise import Column, maximum, minimum, where
from hp_tool.cost.parameters import moe_layers
from hp_tool.cost.section import Section, Stage
from hp_tool.domain.frameworks import facts
from hp_tool.domain.model import ModelSpec
from hp_tool.domain.pipeline_split import missing_layers

NO_LAYERS = 1e-9
"""Layers of a stage that holds none: formulas ask for seconds a layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """Layers on one end of the pipeline; shape (n,)."""

    layers: Column
    """Multi-token-prediction layers of the last stage included."""
    moe_fraction: Column
    """Share of the layers that have experts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLayers:
    """L/p layers on each stage; the leading dense layers of a mixture-of-experts model are on the first. Where p v does not
    divide L, the ends hold fewer, see `domain.pipeline_split`.
    """

    pace: Column
    """Layers of the stage that sets the pace: one between the ends, where there is one."""
    first: End
    last: End
    pace_moe_fraction: Column
    """Share of layers with experts on the stage that sets the pace."""
    fewer_first: Column
    """Layers by which the first stage has fewer than the pace."""
    fewer_last: Column
    """The same of the stage with the output layer."""
    fewer: Column
    """The same of all stages together."""
    output_from_end: Column = 0
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
    dense = model.total_layers - moe_layers(model)
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


def _balanced_layers(model: ModelSpec, p: Column) -> StageLayers:
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
    dense = (model.num_hidden_layers - moe_layers(model)) if model.num_experts else 0
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

"""Axes of a layout: the sizes and settings that a ranking or a search varies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """One axis: a field of `parallel`, with its names in tables, sentences, pages and grids."""

    key: str
    """Name of the field in a query's `parallel`."""
    head: str
    """Column head in terminal tables, also used to describe changes such as `TP 4 -> 8`."""
    label: str
    """Label on pages."""
    meaning: str = ""
    """Meaning of the abbreviation in `head`."""
    column: str | None = None
    """Column in a grid and query parameter in a page's URL; None if the axis has neither."""
    idle: Any = None
    """Value in layouts that do not use the axis. Tables omit the axis if every layout has this
    value. None: tables always show the axis.
    """
    kinds: tuple[Literal["training", "inference"], ...] = ("training",)
    """Kinds of queries that have the axis."""
    drop: int = 0
    """Priority for hiding the column in a narrow terminal, highest first; 0: never hidden."""
    named_in_changes: bool = True
    """Whether descriptions of a layout change mention the axis; False for axes that candidates do
    not store.
    """

    def value(self, layout: Any) -> Any:
        """Return a layout's value of this axis; `idle` if the layout has no such field."""
        value = getattr(layout, self.key, None)
        return self.idle if value is None else value


AXES = (
    Axis(
        key="tensor_parallel_size",
        head="TP",
        label="TP",
        meaning="tensor parallel ranks",
        column="tp",
        kinds=("training", "inference"),
    ),
    Axis(
        key="pipeline_parallel_size",
        head="PP",
        label="PP",
        meaning="pipeline stages",
        column="pp",
        idle=1,
        kinds=("training", "inference"),
    ),
    Axis(
        key="virtual_pipeline_parallel_size",
        head="chunks",
        label="Chunks",
        column="vpp",
        idle=1,
    ),
    Axis(
        key="context_parallel_size",
        head="CP",
        label="CP",
        meaning="context parallel ranks",
        column="cp",
        idle=1,
    ),
    Axis(
        key="context_parallel_communication",
        head="CP by",
        label="CP exchange",
        meaning="how ranks exchange a sequence",
        idle="p2p",
        drop=4,
        named_in_changes=False,
    ),
    Axis(
        key="attention_data_parallel_size",
        head="ADP",
        label="Attention DP",
        meaning="attention data parallel groups",
        idle=1,
        kinds=("inference",),
    ),
    Axis(
        key="expert_parallel_size",
        head="EP",
        label="EP",
        meaning="expert parallel ranks",
        column="ep",
        idle=1,
        kinds=("training", "inference"),
    ),
    Axis(
        key="expert_tensor_parallel_size",
        head="ETP",
        label="Expert TP",
        meaning="tensor parallel ranks per expert",
        column="etp",
        idle=1,
    ),
    Axis(
        key="redundant_experts",
        head="spare",
        label="Redundant experts",
        meaning="redundant experts",
        idle=0,
        kinds=("inference",),
    ),
    Axis(
        key="data_parallel_size",
        head="DP",
        label="DP",
        meaning="data parallel replicas",
        column="dp",
        drop=5,
    ),
    Axis(
        key="micro_batch_size",
        head="micro-batch",
        label="Micro-batch",
        column="mbs",
    ),
    Axis(
        key="sequence_parallel",
        head="SP",
        label="Sequence parallel",
        meaning="sequence parallelism",
        column="sp",
        drop=2,
    ),
    Axis(key="recompute", head="recompute", label="Recomputation", column="recompute"),
    Axis(
        key="zero_stage",
        head="ZeRO",
        label="ZeRO",
        meaning="stage of sharding",
        column="zero",
        drop=3,
    ),
    Axis(
        key="data_parallel_shard_size",
        head="shards",
        label="Shard group",
        meaning="ranks that ZeRO shards over",
        drop=4,
    ),
    Axis(key="pipeline_schedule", head="schedule", label="Schedule"),
    Axis(key="moe_token_dispatcher_type", head="dispatcher", label="Dispatcher"),
    Axis(
        key="max_num_seqs",
        head="max_num_seqs",
        label="Concurrent requests",
        kinds=("inference",),
    ),
    Axis(
        key="max_num_batched_tokens",
        head="max_num_batched_tokens",
        label="Tokens per pass",
        kinds=("inference",),
    ),
)
"""All axes, in the order of table columns."""
AXES_BY_KEY = {axis.key: axis for axis in AXES}


def axes_of_kind(kind: Literal["training", "inference"]) -> tuple[Axis, ...]:
    """Return the axes of one kind of query."""
    return tuple(axis for axis in AXES if kind in axis.kinds)

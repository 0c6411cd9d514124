"""Training rows as hp_tool queries, with the measured figures of each."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from evidence.megatron_bridge import FP8, LORA, megatron_knobs
from evidence.schema import TRAINING
from evidence.table import TABLES, Row, other_values
from hp_tool.catalog import gpu, model
from hp_tool.domain.hardware import ClusterQuery, GpuSpec
from hp_tool.domain.model import ModelSpec
from hp_tool.domain.parallel import ParallelQuery, Recompute, RecomputeName
from hp_tool.domain.query import Query
from hp_tool.domain.units import GIB
from hp_tool.domain.workload import LoraSpec, OverlapSpec, TrainingWorkload
from hp_tool.errors import NotFoundError, UnsupportedError
from hp_tool.questions.training.problem import resolve_model


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A published run as a query, with its measured figures."""

    name: str
    what: str
    query: Query
    step_s: float = math.nan
    """Seconds per step; NaN if only memory was published."""
    allocated_bytes: float | None = None
    """Peak of the allocator's memory in use, in bytes."""
    reserved_bytes: float | None = None
    """Peak of the memory that the allocator reserved, in bytes."""
    used_bytes: float | None = None
    """Memory in use according to the device, or reserved by the allocator, in bytes."""
    source: str = ""
    date: str = ""
    """Year and month in which the figure, or its release, was published, such as 2025-09."""

    def __hash__(self) -> int:
        return hash((self.source, self.name, self.what))  # a custom GPU in a query has dicts

    @property
    def layout(self) -> str:
        """Return the model and the parallel sizes without the batch. Runs with equal values are not
        independent of each other.
        """
        return f"{self.name} {self.what.rpartition(',')[0]}"

    @property
    def card(self) -> str:
        """Return the GPU as the query names it."""
        return str(self.cluster.gpu)

    @property
    def cluster(self) -> ClusterQuery:
        assert isinstance(self.query.cluster, ClusterQuery)
        return self.query.cluster

    @property
    def die(self) -> str:
        return str(gpu(self.card).silicon)

    @property
    def has_experts(self) -> bool:
        return resolve_model(self.query.model).num_experts is not None

    @property
    def training(self) -> TrainingWorkload:
        assert self.query.training is not None
        return self.query.training

    @property
    def release(self) -> str:
        """Return the framework's release; empty if unknown."""
        return self.training.framework_version or ""

    @property
    def task(self) -> str:
        return self.training.task

    @property
    def setting(self) -> str:
        """Return the settings without the release and the author. Runs with equal settings count as
        one vote.
        """
        return repr(with_training(self, framework_version=None).query)


def with_training(case: Case, *, what: str | None = None, **settings: object) -> Case:
    """Return the case with other training settings."""
    training = dataclasses.replace(case.training, **settings)  # type: ignore[arg-type]
    query = dataclasses.replace(case.query, training=training)
    return dataclasses.replace(case, query=query, what=what or case.what)


QUERY_FRAMEWORKS = {"megatron-deepspeed": "megatron-core", "primus": "megatron-core"}
"""Frameworks without constants, and the framework whose constants are used instead."""
GPUS: Mapping[str, GpuSpec] = {
    "h100-sxm-96gb": dataclasses.replace(
        gpu("h100-sxm-80gb"),
        memory_bytes=round(94.99 * GIB),
        memory_bandwidth_bytes_per_second=2.4e12,
        power_w=500.0,
    )
}
"""GPUs that are not in the catalogue. torchtitan's H100 of December 2024 has 96 GB of HBM2e, which
torch reports as 95 GiB.
"""
REQUIRED_COLUMNS = ("gpu", "num_gpus", "sequence_length", "global_batch_size")
"""Columns that a query requires in addition to the model."""
SEPARATE_COLUMNS = frozenset(
    ("gpu", "framework", "overlap", "cuda_graph_modules", "data_parallel_size", "recompute")
)
"""Columns that correspond to query fields in another form, or follow from other columns."""


def training_case(row: Row) -> Case:
    """Return a training row as a query with its measured figures."""
    label, words = LABELS.get(row["table"] or "", DEFAULT_LABEL), _label_values(row)
    return Case(
        name=label.name.format_map(words),
        what=label.what.format_map(words),
        query=training_query(row),
        step_s=step_s(row),
        allocated_bytes=row["allocated_bytes"],
        reserved_bytes=row["reserved_bytes"],
        used_bytes=row["used_bytes"],
        source=label.source or row["source"],
        date=label.date or (row["date"] or "")[:7],
    )


def training_query(row: Row) -> Query:
    """Return the query for a row's settings; blank settings are omitted."""
    settings = _section_settings(row, TrainingWorkload)
    if row["framework"]:
        settings["framework"] = QUERY_FRAMEWORKS.get(row["framework"], row["framework"])
    return Query(
        kind="training",
        model=_model(row),
        cluster=ClusterQuery(
            gpu=GPUS.get(row["gpu"], row["gpu"]), **_section_settings(row, ClusterQuery)
        ),
        training=TrainingWorkload(
            **settings,
            cuda_graph_modules=_split_names(row["cuda_graph_modules"]),  # type: ignore[arg-type]
            lora=LoraSpec(
                rank=row["lora_rank"],
                target_modules=_split_names(row["lora_target_modules"]),
                dropout=row["lora_dropout"] or 0.0,
            )
            if row["lora_rank"]
            else None,
            overlap=_overlap(row["overlap"]),
        ),
        parallel=ParallelQuery(
            **_section_settings(row, ParallelQuery),
            recompute=recompute_of(row["recompute"]) if row["recompute"] else None,
        ),
    )


def as_training_row(preset: Row) -> Row:
    """Return a preset as a training row without figures."""
    precision, scaling = FP8.get(preset["precision"], (preset["precision"], None))
    return {
        **dict.fromkeys(TRAINING.by_name),
        **{name: value for name, value in preset.items() if name in TRAINING.by_name},
        "precision": precision,
        "fp8_recipe": scaling,
        "framework": "megatron-core",
        "gradient_precision": "bf16",
        "cross_entropy": "in_place",
        "optimizer_precision": "bf16" if preset["model"] == "deepseek-v3" else None,
        **(LORA if preset["task"] == "lora" else {}),
        "zero_stage": 3 if preset["use_megatron_fsdp"] else 1,
        "expert_tensor_parallel_size": preset["expert_tensor_parallel_size"] or 1,
        **megatron_knobs(
            dispatcher=preset["moe_token_dispatcher_type"],
            overlaps_experts=preset["overlap_moe_expert_parallel_comm"],
            recompute_modules=preset["recompute_modules"],
            graphs=preset["cuda_graph_impl"],
            graph_modules=preset["cuda_graph_modules"],
            offloaded_layers=preset["cpu_offloading_num_layers"],
        ),
    }


def is_known(row: Row) -> bool:
    """Return whether hp_tool has the row's GPU, and either its model or the row's shape."""
    return unknown_name(row) is None


def unknown_name(row: Row) -> str | None:
    """Return the GPU or model name in a row that hp_tool does not have, or None."""
    if row["gpu"] is None:
        return "no GPU"
    try:
        row["gpu"] in GPUS or gpu(row["gpu"])
    except (NotFoundError, UnsupportedError):
        return f"unknown GPU {row['gpu']}"
    try:
        row.get("hidden_size") or model(row["model"])
    except (NotFoundError, UnsupportedError):
        return f"unknown model {row['model']}"
    return None


def missing_fields(row: Row) -> str | None:
    """Return the reason why a training row is not a complete query, or None if it is."""
    blank = [name for name in REQUIRED_COLUMNS if row[name] is None]
    return f"no {', '.join(blank)}" if blank else unknown_name(row)


def step_s(row: Row) -> float:
    """Return the seconds of a step: the printed value, or the value computed from the printed
    speed. Return NaN if the row has neither.
    """
    if row["step_s"] is not None:
        return float(row["step_s"])
    total, per_gpu = row["tokens_per_second"], row["tokens_per_second_per_gpu"]
    if total is None and per_gpu is None:
        return math.nan
    tokens = row["global_batch_size"] * row["sequence_length"]
    return float(tokens / (per_gpu * row["num_gpus"] if total is None else total))


def recompute_of(words: str) -> RecomputeName | Recompute:
    """Convert a value such as `selective mlp+moe_act` to its parts; return a single name
    unchanged.
    """
    granularity, _, modules = words.partition(" ")
    if granularity == "selective" and modules:
        return Recompute(granularity="selective", modules=_split_names(modules))  # type: ignore[arg-type]
    return words  # type: ignore[return-value]


def _model(row: Row) -> str | ModelSpec:
    shape = _section_settings(row, ModelSpec)
    if not shape:
        return str(row["model"])
    name = row["variant"] or row["model"]
    try:
        base = model(row["model"])
    except (NotFoundError, UnsupportedError):
        return ModelSpec(name=name, **shape)
    if "hidden_size" in shape:  # another width: heads follow from it
        shape = {"num_key_value_heads": None, "head_dim": None, **shape}
    return dataclasses.replace(base, **({"name": name} if row["variant"] else {}), **shape)


def _section_settings(row: Row, part: type[Any]) -> dict[str, Any]:
    """Return the settings of a row that are fields of `section`, one section of a query."""
    names = (each.name for each in dataclasses.fields(part) if each.name not in SEPARATE_COLUMNS)
    return {name: row[name] for name in names if row.get(name) is not None}


def _split_names(joined: str | None) -> tuple[str, ...] | None:
    return tuple(joined.split("+")) if joined else None


def _overlap(words: str | None) -> OverlapSpec | None:
    if not words:
        return None
    pairs = (pair.split("=") for pair in words.split("+"))
    return OverlapSpec(**{name: value == "true" for name, value in pairs})


FP8_NAMES = {precision: name for name, precision in FP8.items()}
"""Megatron Bridge's names of a precision with its scaling."""


def bridge_precision(row: Row) -> str:
    """Return Megatron Bridge's name of the row's precision and scaling."""
    return FP8_NAMES.get((row["precision"], row["fp8_recipe"]), str(row["precision"]))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Label:
    """Templates for the names of a table's rows in reports; braces contain columns and names of
    `_label_values`.
    """

    source: str
    what: str
    name: str = "{model}{task_if_not_pretrain}"
    date: str = ""
    """Month that applies to all rows; empty: each row has its own."""


SIZES = {
    "TP": "tensor_parallel_size",
    "PP": "pipeline_parallel_size",
    "VP": "virtual_pipeline_parallel_size",
    "CP": "context_parallel_size",
    "EP": "expert_parallel_size",
    "mbs": "micro_batch_size",
    "GBS": "global_batch_size",
    "DP": "data_parallel_size",
}


def _label_values(row: Row) -> dict[str, Any]:
    """Return the values that labels may contain: columns, sizes under their short names, and terms
    for both.
    """
    card, _, form = str(row["gpu"]).partition("-")
    task, values_of_other = row["task"] or "pretrain", other_values(row)
    shard = values_of_other.get("optimizer_shard_gpus")
    given = (f"{name} {row[SIZES[name]]}" for name in SIZES if name not in ("VP", "DP"))
    return {
        **row,
        **{name: row[column] for name, column in SIZES.items()},
        "gpus": f"{card.upper()}{'-NVL' if form.startswith('nvl-') else ''} x{row['num_gpus']}",
        "GPU": str(row["gpu"]).upper(),
        "task_if_not_pretrain": "" if task == "pretrain" else f" {task}",
        "size": (row["run"] or "").partition(" ")[0],
        "bridge_precision": bridge_precision(row),
        "stated_precision": row["precision"] or "bf16",
        "stated_sizes": "".join(f", {size}" for size in given if not size.endswith(" None")),
        "or_fsdp": ", FSDP" if row["zero_stage"] == 3 else "",
        "or_fp8": ", fp8" if row["precision"] == "fp8" else "",
        "or_sp": " + SP" if row["sequence_parallel"] else "",
        "or_sharded": f" over {shard}" if shard else "",
        "or_packed": ", one sample" if values_of_other.get("packed_into_one_sample") == "1" else "",
        "or_async": ", async TP" if values_of_other.get("async_tp") == "1" else "",
    }


DEFAULT_LABEL = Label(source="", what="{gpus}, {stated_precision}{stated_sizes}")
"""Label of rows whose table is not in LABELS."""


LABELS: Mapping[str, Label] = {
    table: Label(**{name: line[name] for name in ("source", "name", "what", "date")})
    for table, line in TABLES.items()
    if line["what"]
}
"""Labels by table, from tables.csv."""

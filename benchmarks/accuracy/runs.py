"""Published training runs as cases: which rows of the evidence are used, and how their settings
become queries.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median

from benchmarks.accuracy.data import rows
from evidence.cases import (
    Case,
    as_training_row,
    bridge_precision,
    is_known,
    training_case,
    with_training,
)
from evidence.table import Row, other_values
from hp_tool.catalog import model
from hp_tool.errors import UnsupportedError
from hp_tool.questions.training.problem import resolve_training

RECIPES = "training_megatron_bridge_recipes"
HYBRIDS = ("nemotron-3-nano-30b-a3b",)
"""Models whose layers differ."""
NEWEST = "26.02.01"
"""First release with the current grouped matmuls, dispatcher and CUDA graphs. With earlier releases
the same configurations took up to twice as long.
"""
KNOBS = (
    "overlap",
    "recompute",
    "cuda_graphs",
    "cuda_graph_modules",
    "offload",
    "offload_fraction",
    "moe_token_dispatcher_type",
)
"""Settings that come from the release's preset if a row omits them."""
SCHEDULES = (None, "interleaved", "1f1b", "zbv", "zb-h1")
"""Pipeline schedules that a query supports. Primus' zbb (twice the memory of ZB-H1), v-half and
v-min are not supported.
"""
MICRO_BATCHES_A_STAGE = 4
"""Assumed number of micro-batches per stage, which Primus does not state. Ratios of schedules
depend on it; nothing is fitted to them.
"""


def _of(
    *tables: str, where: Callable[[Row], bool] = lambda row: True, **left_out: None
) -> Callable[[Path], list[Case]]:
    """Return a function that returns the cases of these tables in a folder; it clears the figures
    named in `left_out`.
    """

    def cases(folder: Path) -> list[Case]:
        rows = [row for table in tables for row in _rows(folder, table) if where(row)]
        return [dataclasses.replace(training_case(row), **left_out) for row in rows]

    return cases


def _rows(folder: Path, table: str) -> list[Row]:
    return [row for row in rows(folder, table) if is_known(row)]


megatron_2020_cases = _of("megatron_lm_2020_scaling")
"""Return GPT of 1B to 8B on V100 and A100: tensor and data parallelism, one micro-batch per step,
full recomputation.

The tensor-parallel collectives of this software overlap with nothing. Replicas reduce their
gradients during the backward pass (--DDP-impl torch) from TP 4 on. At TP 1 and 2 they reduce them
afterwards; the README of that commit says that overlap is slower there.
"""
table5_cases = _of("korthikanti2022_table5")
"""Return Table 5 of arXiv 2205.05198: full recomputation without SP, and selective recomputation
with SP.
"""
b200_cases = _of("memory_b200_megatron")
"""Return reduced models on 8 B200 without overlap: step time and allocated memory."""
dgxc_cases = _of("training_dgxc", where=lambda row: row["task"] == "pretrain")
"""Return NVIDIA's DGX Cloud benchmarks of NeMo on H100: Llama 3 in 16 bits and fp8."""
mpt_cases = _of("training_llm_foundry_fsdp")
"""Return MPT of 125M to 70B on A100 under llm-foundry: sharded over all GPUs, gradients reduced in
16 bits (mixed_precision PURE), flash-attn's fused loss, full or no recomputation.
"""
mpt_h100_cases = _of("training_llm_foundry_h100")
"""Return MPT of 1B to 30B on 8 to 512 H100, in bf16 and fp8; other settings as in mpt_cases."""
trl_cases = _of("training_trl_long")
"""Return TRL at a million tokens: one sequence over all GPUs, full recomputation, and layer inputs
offloaded to the host.
"""
internevo_cases = _of(
    "training_internevo", where=lambda row: row["step_s"] is not None and not row["run"]
)
"""Return step times of InternLM-7B. If a packed row repeats an unpacked figure, only the unpacked
row is returned.

Whether samples share a row or not, attention covers 2,048 tokens: otherwise the recomputed rows of
eight samples would take a third longer.
"""
memory_cases = _of("training_internevo", where=lambda row: row["used_bytes"] is not None)
"""Return memory in use of InternEvo on a few GPUs, without step times. It includes the allocator's
cache, which fills the device with three stages.
"""
bloom_cases = _of("grid_a100_bloom", used_bytes=None)
"""Return 177B to 205B models on A100 under Megatron-DeepSpeed of February 2022 with full
recomputation. Their queries name Megatron Core.
"""
recipe_cases = _of(RECIPES)
"""Return Megatron Bridge's measured recipes that state the settings of their release."""
hybrid_cases = _of(f"{RECIPES}_2", where=lambda row: row["model"] in HYBRIDS)
"""Return recipes of models whose layers differ, on all GPUs."""


def mlperf_cases(folder: Path) -> list[Case]:
    """Return a case for each audited result. Several submitters of one setting are several
    cases.

    The release of a submission is the month in which its round was published, one to five months
    after the container that it names. The table does not state LoRA's dropout: the measured peaks
    of memory lie between those predicted with and without it.
    """
    return [_dated(training_case(row)) for row in _rows(folder, "training_mlperf")]


def cdna4_cases(folder: Path) -> list[Case]:
    """Return Llama 3.1 8B on 8 MI355X: four submitters of one recipe, to which no constant was
    fitted.
    """
    return [_dated(training_case(row)) for row in _rows(folder, "training_mlperf_2")]


def round_6_cases(folder: Path) -> list[Case]:
    """Return MLPerf's round 6.0 on Blackwell, to which no constant was fitted; its month is not
    stated.
    """
    return [training_case(row) for row in _rows(folder, "mlperf_v6")]


def _dated(case: Case) -> Case:
    """Return the case with its month as the release. Runs on AMD have no release, because they use
    other software.
    """
    version = None if case.card.startswith("mi") else case.date[2:].replace("-", ".")
    return with_training(case, framework_version=version)


def schedule_cases(folder: Path) -> list[tuple[Case, Case]]:
    """Return (1F1B, another schedule) for each model on a card. step_s is the seconds per token and
    GPU; only the ratio is meaningful.
    """
    stated = [
        row
        for row in rows(folder, "schedules_primus")
        if row["tokens_per_second_per_gpu"] and row["pipeline_schedule"] in SCHEDULES
    ]
    cases = [(row["run"], _schedule(row)) for row in stated]
    base = {case.name: case for schedule, case in cases if schedule == "1f1b"}
    return [(base[case.name], case) for schedule, case in cases if schedule != "1f1b"]


def _schedule(row: Row) -> Case:
    plain = row["pipeline_schedule"] in ("1f1b", "interleaved")
    return training_case(
        {
            **row,
            "sequence_length": 4096,
            "global_batch_size": MICRO_BATCHES_A_STAGE * row["num_gpus"],
            "micro_batch_size": 1,
            "cross_entropy": "fused",
            "pipeline_schedule": None if plain else row["pipeline_schedule"],
            "step_s": 1.0 / row["tokens_per_second_per_gpu"],
            "used_bytes": None,
        }
    )


def titan_cases(folder: Path) -> tuple[list[Case], list[str]]:
    """Return (Llama 2 and 3 under torchtitan's FSDP2 in eager mode, reasons why the remaining rows
    are excluded).

    Gradients are reduced in fp32, and the loss is unfused.

    Excluded: torch.compile (it fuses elementwise kernels), float8 and asynchronous tensor
    parallelism of a compiler, GPUs with a lowered power limit, and recomputation that is not
    modelled.
    """
    cases, left = [], []
    for row in rows(folder, "training_torchtitan"):
        case, why = training_case({**row, "reserved_bytes": None}), _missing(row)
        if not why:
            try:
                resolve_training(case.query)
            except UnsupportedError as error:
                why = str(error)
        if why:
            left.append(why)
        else:
            cases.append(case)
    return cases, left


def _missing(row: Row) -> str | None:
    if row["status"] == "out_of_memory":
        return "ran out of memory: no step time"
    if row["gpu"] == "h100-sxm-96gb":
        return "a GPU that no catalogue has: H100-SXM 96GB HBM2e 2.4TB/s 500W"
    if other_values(row).get("torch_compile") == "1":
        return "torch.compile"
    if row["recompute"] not in ("none", "full", "per_op"):
        return f"recomputation of {row['recompute']}"
    return None


def reserved_cases(folder: Path) -> list[Case]:
    """Return Llama 3.1 of 8B and 70B under torchtitan with full recomputation and float8 matmuls;
    compilation does not affect their memory. Reserved memory near the capacity of the device
    depends more on the allocator than on the model.
    """
    return [
        training_case({**row, "precision": "fp8", "tokens_per_second_per_gpu": None})
        for row in rows(folder, "training_torchtitan")
        if row["recompute"] == "full" and row["reserved_bytes"]
    ]


def pretraining(folder: Path) -> list[Case]:
    """Return every release and every audited round of pre-training that is published with its
    layout.
    """
    return [
        case for case in (*release_cases(folder), *mlperf_cases(folder)) if case.task == "pretrain"
    ]


def release_cases(folder: Path) -> list[Case]:
    """Return every release of every configuration. If two tables contain the same run, the row that
    states more settings is returned.
    """
    known = {(row["num_gpus"], row["tokens_per_second_per_gpu"]) for row in _rows(folder, RECIPES)}
    dense = [
        training_case(_filled(row))
        for row in _bridge_rows(folder, experts=False)
        if (row["num_gpus"], row["tokens_per_second_per_gpu"]) not in known
    ]
    named = [dataclasses.replace(case, what=f"{case.what}, {case.release}") for case in dense]
    rates = {(gpus, round(rate)) for gpus, rate in known}
    mixtures = [case for case in moe_cases(folder) if _rate(case) not in rates]
    return [*recipe_cases(folder), *named, *mixtures]


def _rate(case: Case) -> tuple[int | None, int]:
    """Return the number of GPUs and the tokens per second of each."""
    training, gpus = case.training, case.cluster.num_gpus
    assert isinstance(gpus, int)
    assert isinstance(training.global_batch_size, int)
    tokens = training.global_batch_size * training.sequence_length
    return gpus, round(tokens / case.step_s / gpus)


def _bridge_rows(folder: Path, *, experts: bool) -> list[Row]:
    """Return rows of Bridge's and NeMo's pages whose precision is known."""
    return [
        row
        for row in _rows(folder, "training_megatron_bridge")
        if row["precision"] in ("fp8", "mxfp8") and _has_experts(row) == experts
    ]


def _filled(row: Row) -> Row:
    """Return the row with one model chunk and the distributed optimizer, unless the page states
    other values.
    """
    names = ("virtual_pipeline_parallel_size", "zero_stage")
    return {**row, **{name: row[name] or 1 for name in names}}


def _has_experts(row: Row) -> bool:
    return model(row["model"]).num_experts is not None


def bridge_cases(folder: Path) -> list[Case]:
    """Return NVIDIA's published fp8 recipes of dense models on H100 and B200, the median over the
    releases of each configuration.
    """
    grouped: dict[tuple[str, int | None], list[Row]] = defaultdict(list)
    for row in _bridge_rows(folder, experts=False):
        # Pages that state FSDP are separate from pages that do not.
        grouped[training_case(_filled(row)).setting, row["zero_stage"]].append(row)
    return [_median(members) for members in grouped.values()]


def _median(members: list[Row]) -> Case:
    """Return the first row, with the middle release and the median rate."""
    releases = sorted(row["framework_version"] for row in members)
    rate = median(row["tokens_per_second_per_gpu"] for row in members)
    return training_case(
        {
            **_filled(members[0]),
            "framework_version": releases[len(releases) // 2],
            "tokens_per_second_per_gpu": rate,
        }
    )


def moe_cases(folder: Path) -> list[Case]:
    """Return every release of every MoE model; rows that are printed twice count once. Their tables
    omit recomputation, CUDA graphs and router balancing.

    Runs of 25.09 dropped tokens above the mean load, as one of their two tables states. Token
    dropping makes shapes fixed, so the recipe for B200 records the whole iteration as a CUDA graph.
    """
    cases = {}
    for row in _bridge_rows(folder, experts=True):
        dropped = row["expert_capacity_factor"] is not None
        graphs = dropped and row["gpu"] == "b200-sxm-180gb"
        knobs = {"parameter_precision": "fp8", "cross_entropy": "in_place", "cuda_graphs": graphs}
        case = training_case({**_filled(row), **knobs})
        what = (
            f"{case.what}, EP {row['expert_parallel_size']}, micro-batch "
            f"{row['micro_batch_size']}{', tokens dropped' if dropped else ''}, release "
            f"{case.release}"
        )
        cases[what] = dataclasses.replace(case, what=what)
    return list(cases.values())


def newest(cases: Iterable[Case]) -> list[Case]:
    """Return the rows of current software."""
    return [case for case in cases if case.release >= NEWEST]


def gb300_cases(folder: Path) -> list[Case]:
    """Return recipes on GB300 that state their settings, of models that other cards ran too.
    Settings that a row omits come from the preset of its release.
    """
    presets = {
        _cell(row, row["precision"]): row for row in rows(folder, "recipe_settings_by_release")
    }
    cases = []
    for row in _rows(folder, f"{RECIPES}_2"):
        if row["gpu"] == "gb300-nvl72" and row["model"] not in HYBRIDS:
            if "knobs_from" not in other_values(row):
                row = {**row, **_knobs(row, presets.get(_cell(row, bridge_precision(row))))}
            cases.append(training_case(row))
    return cases


def _knobs(row: Row, preset: Row | None) -> dict[str, object]:
    """Return the settings of a row's preset; fp8 runs store parameters in 8 bits."""
    narrow = "parameter_precision" if row["task"] == "pretrain" else "frozen_precision"
    quantised = {narrow: "fp8"} if row["precision"] in ("fp8", "mxfp8") else {}
    if preset is None:
        return dict(quantised)
    stated = as_training_row(preset)
    return {**quantised, **{name: stated[name] for name in KNOBS}}


def _cell(row: Row, precision: str) -> tuple[str, ...]:
    return (row["framework_version"], row["model"], row["gpu"], precision, row["task"])

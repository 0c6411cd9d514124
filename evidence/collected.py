"""Tables with the columns of their sources, as rows of the schema.

The files of evidence/ were made from such tables. A folder of them (`--data DIR`), such as newer
measurements from the same sources, is read with the same mapping. To add other measurements, write
the schema's columns instead.
"""

from __future__ import annotations

import csv
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from evidence.arithmetic import impossible
from evidence.dates import date_of
from evidence.megatron_bridge import FP8, LORA, megatron_knobs
from evidence.schema import KINDS, Column
from evidence.table import FILE_OF, Row, cell_of, parse

GIB = float(2**30)
PERCENT = 100.0
MILLI = 1000.0
BLANK = ("", "n/a")
RENAMED: Mapping[str, str | tuple[str, float]] = {
    "gpus": "num_gpus",
    "gpus_per_node": "gpus_per_node",
    "seq": "sequence_length",
    "seq_tokens": "sequence_length",
    "sequence_length": "sequence_length",
    "gbs": "global_batch_size",
    "mbs": "micro_batch_size",
    "micro_batch_size": "micro_batch_size",
    "local_bs": "micro_batch_size",
    "ga": "num_microbatches",
    "grad_accum": "num_microbatches",
    "grad_acc": "num_microbatches",
    "num_microbatches": "num_microbatches",
    "tp": "tensor_parallel_size",
    "pp": "pipeline_parallel_size",
    "vp": "virtual_pipeline_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_parallel_size",
    "etp": "expert_tensor_parallel_size",
    "dp": "data_parallel_size",
    "layout": "pipeline_layout",
    "pipeline_layout": "pipeline_layout",
    "step_s": "step_s",
    "step_time_s": "step_s",
    "iter_ms": ("step_s", MILLI),
    "step_s_fastest_run": "step_s_fastest_run",
    "step_s_slowest_run": "step_s_slowest_run",
    "step_s_p10": "step_s_p10",
    "step_s_p90": "step_s_p90",
    "fwd_ms": ("forward_s", MILLI),
    "bwd_ms": ("backward_s", MILLI),
    "tokens_per_s": "tokens_per_second",
    "tokens_s": "tokens_per_second",
    "tokens_per_s_gpu": "tokens_per_second_per_gpu",
    "tokens_s_gpu": "tokens_per_second_per_gpu",
    "tok_s_gpu": "tokens_per_second_per_gpu",
    "tps_per_gpu": "tokens_per_second_per_gpu",
    "tflops_gpu": "model_tflops_per_gpu",
    "tflops_s_gpu": "model_tflops_per_gpu",
    "model_tflops_gpu": "model_tflops_per_gpu",
    "model_tflops_s_gpu": "model_tflops_per_gpu",
    "mfu_pct": ("mfu", PERCENT),
    "hfu_pct": ("hfu", PERCENT),
    "memory_gb": ("used_bytes", 1.0 / GIB),
    "lora_rank": "lora_rank",
    "engine": "engine",
    "engine_version": "engine_version",
    "version": "engine_version",
    "isl": "input_length",
    "osl": "output_length",
    "isl_tokens": "input_length",
    "osl_tokens": "output_length",
    "concurrency": "concurrency",
    "num_requests": "concurrency",
    "num_prompts": "num_prompts",
    "attention_dp": "attention_data_parallel_size",
    "moe_tp": "moe_tensor_parallel_size",
    "moe_ep": "expert_parallel_size",
    "ttft_ms": ("ttft_s", MILLI),
    "tpot_ms": ("tpot_s", MILLI),
    "output_tokens_s": "output_tokens_per_second",
    "output_tok_s": "output_tokens_per_second",
    "output_tokens_s_gpu": "output_tokens_per_second_per_gpu",
    "mem_fraction_static": "memory_fraction",
    "memory_fraction": "memory_fraction",
    "cuda_graph_modules": "cuda_graph_modules",
    "source": "source",
}
"""Schema columns, and what divides a figure to their units, by the tables' own names."""
LEFT_OUT = frozenset(
    {
        "command", "client_command", "note", "notes", "check", "symbols", "wip", "stated",
        "hardware_as_stated", "version_as_stated", "settings_from", "model_note", "superseded",
        "gflop_per_token", "gflop_per_token_deviates", "derived_step_s", "recomputed_mfu_pct",
        "recomputed_hfu_pct", "recomputed_increase_pct", "recomputed_mfu_full_recompute_pct",
        "recomputed_days_8TP", "recomputed_combined", "recomputed_overhead_pct", "overhead_pct",
        "combined_ms", "ref_gflop_per_token_causal", "ref_gflop_per_token_full", "peer_ms",
        "peer_alloc_gib", "recomputed_tflops_full_recompute_seq1024", "section", "source_line",
        "tokens_s_gpu_from_step", "recipe_agrees", "recipe_train_gbs", "memory_printed", "typed",
        "peak_tflops", "params_b", "row_in_file",
    }
)  # fmt: skip
"""Free text, commands, and figures computed from others of the row."""
GPUS = {
    "a100": "a100-sxm-80gb",
    "a100-sxm-80gb": "a100-sxm-80gb",
    "a100-sxm4-80gb": "a100-sxm-80gb",
    "a100-80gb": "a100-sxm-80gb",
    "a100 80gb": "a100-sxm-80gb",
    "a100_80gb": "a100-sxm-80gb",
    "a100_sxm": "a100-sxm-80gb",
    "a100_40gb": "a100-sxm-40gb",
    "a100 40gb": "a100-sxm-40gb",
    "a800": "a800-sxm-80gb",
    "a10g 24gb": "a10g-24gb",
    "b200": "b200-sxm-180gb",
    "b200-sxm": "b200-sxm-180gb",
    "b200_sxm": "b200-sxm-180gb",
    "b300": "b300-sxm-288gb",
    "dgx-b200": "b200-sxm-180gb",
    "dgx-h100": "h100-sxm-80gb",
    "dgx_h100": "h100-sxm-80gb",
    "gb200": "gb200-nvl72",
    "gb300": "gb300-nvl72",
    "gh200": "gh200-96gb",
    "h100": "h100-sxm-80gb",
    "h100 80gb": "h100-sxm-80gb",
    "h100 80gb (deduced, not printed)": "h100-sxm-80gb",
    "h100_80gb": "h100-sxm-80gb",
    "h100_sxm": "h100-sxm-80gb",
    "h100-sxm 96gb hbm2e 2.4tb/s 500w": "h100-sxm-96gb",
    "h20": "h20-sxm-96gb",
    "h20 96gb": "h20-sxm-96gb",
    "h200": "h200-sxm-141gb",
    "h200_sxm": "h200-sxm-141gb",
    "h200-nvl": "h200-nvl-141gb",
    "l40s": "l40s-48gb",
    "mi300x": "mi300x-192gb",
    "mi325x": "mi325x-256gb",
    "mi350x": "mi350x-288gb",
    "mi355x": "mi355x-288gb",
    "a100 (80 gb by the peak)": "a100-sxm-80gb",
    "a6000 48gb": "rtx-a6000-48gb",
    "rtx 4090": "rtx-4090-24gb",
    "rtx 5090": "rtx-5090-32gb",
}
"""Catalogue names; other GPUs keep the name that the source gives them."""
MODELS = {
    "gpt3": "gpt3-175b",
    "gpt_oss_120b": "gpt-oss-120b",
    "gpt_oss_20b": "gpt-oss-20b",
    "deepseek_v3": "deepseek-v3",
    "deepseekv3_671b": "deepseek-v3",
    "deepseekv2": "deepseek-v2",
    "kimi_k2": "kimi-k2",
    "llama2-13b": "llama-2-13b",
    "llama2-70b": "llama-2-70b",
    "llama2_70b_lora": "llama-2-70b",
    "llama3-8b": "llama-3-8b",
    "llama3-70b": "llama-3-70b",
    "llama3_8b": "llama-3-8b",
    "llama3_70b": "llama-3-70b",
    "llama3.1-8b": "llama-3.1-8b",
    "llama3.1-70b": "llama-3.1-70b",
    "llama31_8b": "llama-3.1-8b",
    "llama31_405b": "llama-3.1-405b",
    "nemotron_3_nano": "nemotron-3-nano-30b-a3b",
    "nemotron_3_super": "nemotron-3-super-120b-a12b",
    "qwen3_30b_a3b": "qwen3-30b-a3b",
    "qwen3_235b_a22b": "qwen3-235b-a22b",
    "Qwen3_30B_a3B": "qwen3-30b-a3b",
    "LLAMA2-7B": "llama-2-7b",
    "LLAMA2-13B": "llama-2-13b",
    "LLAMA2-70B": "llama-2-70b",
    "LLAMA3-8B": "llama-3-8b",
    "LLAMA3_8B": "llama-3-8b",
    "LLAMA3-70B": "llama-3-70b",
    "LLAMA3_70B": "llama-3-70b",
    "LLAMA3.1_405B": "llama-3.1-405b",
    "GPT3-5B": "gpt3-5b",
    "GPT3-20B": "gpt3-20b",
    "GPT3-175B": "gpt3-175b",
    "22B": "gpt-22b",
    "175B": "gpt3-175b",
    "Llama 2 7B": "llama-2-7b",
    "Llama 2 7b": "llama-2-7b",
    "Llama 3 8B": "llama-3-8b",
    "Llama3 8B": "llama-3-8b",
    "Llama3 70B": "llama-3-70b",
    "Llama 3 8B (torchao's page; not named here)": "llama-3-8b",
    "Llama 3.1 8B": "llama-3.1-8b",
    "Llama 3.2 3B": "llama-3.2-3b",
    "Qwen2.5 32B": "qwen2.5-32b",
    "Qwen3 MoE 30B": "qwen3-30b-a3b",
    "GPT-OSS 20B": "gpt-oss-20b",
    "DeepSeek V3 671B": "deepseek-v3",
    "Nemotron V3 Nano 30B (26.02)": "nemotron-3-nano-30b-a3b",
    "Qwen/Qwen2.5-3B": "qwen2.5-3b",
    "Qwen/Qwen2.5-3B-Instruct": "qwen2.5-3b",
    "Qwen/Qwen2.5-7B": "qwen2.5-7b",
    "Qwen/Qwen2.5-7B-Instruct": "qwen2.5-7b",
    "Qwen/Qwen2.5-14B": "qwen2.5-14b",
    "530B": "mt-nlg-530b",
    "1T": "gpt-1t",
}
"""Catalogue names of training's models; others keep the name that the source gives them."""
SHAPES: Mapping[str, Mapping[str, Any]] = {
    # config.json of bigcode/gpt_bigcode-santacoder
    "santacoder-1.1b": {
        "num_hidden_layers": 24,
        "hidden_size": 2048,
        "num_attention_heads": 16,
        "num_key_value_heads": 1,
        "intermediate_size": 8192,
        "vocab_size": 49280,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
    },
    # config.json of Qwen/Qwen-7B and Qwen-1_8B, whose intermediate_size counts both halves
    "Qwen-7B": {
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "intermediate_size": 11008,
        "vocab_size": 151936,
        "gated_mlp": True,
        "normalization": "rmsnorm",
        "tie_word_embeddings": False,
    },
    "Qwen-1.8B": {
        "num_hidden_layers": 24,
        "hidden_size": 2048,
        "num_attention_heads": 16,
        "intermediate_size": 5504,
        "vocab_size": 151936,
        "gated_mlp": True,
        "normalization": "rmsnorm",
        "tie_word_embeddings": False,
    },
}
"""Shapes of models that the catalogue does not have."""
TARGETS = {
    "query+value": "q_proj+v_proj",
    "q+v": "q_proj+v_proj",
    "query+key+value+projection+mlp+head": "q_proj+k_proj+v_proj+o_proj+linear_fc1+linear_fc2",
    "*_proj": "q_proj+k_proj+v_proj+o_proj+gate_proj+up_proj+down_proj",
    "all": "q_proj+k_proj+v_proj+o_proj+gate_proj+up_proj+down_proj",
    "c_attn+c_proj+w1+w2": "linear_qkv+o_proj+gate_proj+up_proj+down_proj",
}
"""Matrices with adapters, by each source's names."""
CAPACITY = {"tokendrop": 1.0}
"""Tokens kept, over the mean load, of a release that dropped the rest."""
TASKS = {"Pre-Training": "pretrain", "SFT": "sft", "LoRA": "lora", "sft full": "sft"}
NAMES: Mapping[str, Mapping[str, str]] = {
    "model": MODELS,
    "task": TASKS,
    "status": {"ok": "ran", "oom": "out_of_memory"},
    "recompute": {"selective op": "per_op", "selective per op": "per_op"},
    "pipeline_schedule": {
        "1f1b-interleaved": "interleaved",
        "zbv-formatted": "zbv",
        "zero-bubble": "zb-h1",
    },
    "lora_target_modules": TARGETS,
}
"""The schema's words for those of the tables, by column."""
SYSTEMS_2020 = {"DGX-2 V100": ("v100-sxm-32gb", 16), "DGX-A100": ("a100-sxm-40gb", 8)}
INFERENCEMAX = {("1024", "1024"), ("1024", "8192"), ("8192", "1024")}
"""Lengths of the dated serving runs that InferenceMAX's client sent."""
SERVED_PRECISIONS = {"": "bf16", "fp8": "fp8", "fp8_block": "fp8", "nvfp4": "nvfp4"}
SHIPPED = {"openai/gpt-oss-120b": "mxfp4"}
"""Formats of checkpoints, whatever a table calls them."""


@dataclass(frozen=True, kw_only=True)
class Correction:
    """Cells of collected rows that cannot be right, and why."""

    table: str
    rows: Mapping[str, str]
    """Cells that the rows have."""
    cells: Mapping[str, str]
    """What replaces them; blank: the figure is left out."""
    reason: str


CORRECTIONS = (
    Correction(
        table="grid_a100_bloom",
        rows={"gpus": "320", "pp": "10", "dp": "8"},
        cells={"dp": ""},
        reason="TP 8 x PP 10 x DP 8 would be 640 GPUs; it ran on 320, so DP is left out",
    ),
    Correction(
        table="training_mlperf_2",
        rows={"submitter": "GigaComputing"},
        cells={"grad_accum": ""},
        reason="a micro-batch of 4 on 8 GPUs is the whole batch of 32; the count of 2 "
        "micro-batches, read from the configuration's name, is left out",
    ),
    Correction(
        table="kv_cache_counts",
        rows={"gpu": "A10", "kv_blocks": "8348"},
        cells={"excluded": "133,568 tokens of Llama 2 7B are 65 GiB, which an A10 does not have"},
        reason="the printed figure is not a number of blocks of 16 tokens",
    ),
)
"""Applied when a table is read; whatever else contradicts itself is kept and excluded."""


class Cells(dict[str, str]):
    """A row as collected; remembers which cells were read."""

    def __init__(self, cells: Mapping[str, str | None]) -> None:
        super().__init__({name: cell or "" for name, cell in cells.items() if name})
        self.seen: set[str] = set()

    def __getitem__(self, name: str) -> str:
        self.seen.add(name)
        return super().__getitem__(name) if name in self else ""

    def flag(self, name: str) -> bool | None:
        """Return a cell of 0 or 1, true or false; None: blank."""
        cell = self[name].lower()
        return None if cell == "" else cell in ("1", "true")


Values = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Format:
    """How one collected table maps to the schema, beside the columns in RENAMED."""

    columns: str = ""
    """Columns of the schema, each with the name of its cell where that differs (`gpu=system`);
    NAMES, flags and GiB are translated.
    """
    assumed: Values = field(default_factory=dict)
    """Settings that the source does not print: its software's, or deduced."""
    rows: Callable[[Cells], Iterable[Values]] = lambda row: ({},)
    """What several cells decide: one set a row, or several rows."""


def _copied(row: Cells, column: Column, cell: str) -> Any:
    """Return a cell as the schema states it; None: blank."""
    if column.type == "flag":
        return row.flag(cell)
    text = row[cell]
    if column.unit == "bytes":
        return _bytes(text)
    if column.name == "gpu":
        return GPUS.get(text.lower(), text) or None
    return NAMES.get(column.name, {}).get(text, text) or None


def read_collected(path: Path, table: str) -> list[Row]:
    """Return the rows of a collected table in the schema.

    A row that the schema cannot hold is skipped, with a notice on stderr; another names the rows
    that contradict themselves.
    """
    rows: list[Row] = []
    with path.open(newline="", encoding="utf-8") as stream:
        reader = csv.DictReader(stream)
        for cells in reader:
            try:
                rows += converted(cells, table)
            except (KeyError, ValueError) as error:
                print(f"skipped: {path}:{reader.line_num}: {error}", file=sys.stderr)
    excluded = [row["excluded"] for row in rows if row["excluded"]]
    if excluded:
        print(f"excluded: {len(excluded)} rows of {path}, such as: {excluded[0]}", file=sys.stderr)
    return rows


def converted(cells: Mapping[Any, Any], table: str) -> Iterator[Row]:
    """Yield the rows of the schema that a collected row becomes.

    A row whose figures contradict each other states so in `excluded`.
    """
    format, kind = FORMATS[table], KINDS[FILE_OF[table].partition("/")[0]]
    row = Cells(_corrected(_mended(cells, table), table))
    pairs = (pair.partition("=") for pair in format.columns.split())
    copied = {name: _copied(row, kind.by_name[name], cell or name) for name, _, cell in pairs}
    for values in ({**copied, **decided} for decided in format.rows(row)):
        given = {**_renamed(row, values), **format.assumed, **values, "table": table}
        given |= date_of(table, row, str(given.get("source") or ""))
        given["other"] = _others(row)
        given["source"] = given.get("source") or f"{table}.csv"
        texts = {name: cell_of(value) for name, value in given.items()}
        typed, reasons = parse(texts | {"excluded": "unchecked"}, kind)
        if reasons:
            raise ValueError("; ".join(reasons))
        contradictions = impossible({**typed, "excluded": None}, kind.name)
        yield {**typed, "excluded": row["excluded"] or "; ".join(contradictions) or None}


def _corrected(cells: Mapping[str, Any], table: str) -> Mapping[str, Any]:
    for correction in CORRECTIONS:
        if correction.table == table and correction.rows.items() <= cells.items():
            cells = {**cells, **correction.cells}
    return cells


def _mended(cells: Mapping[Any, Any], table: str) -> Mapping[str, Any]:
    """Return the cells; a row of cache counts has an unquoted comma in the name of its GPU."""
    if None not in cells:
        return cells
    if table != "kv_cache_counts":
        raise ValueError(f"{table}: more cells than columns: {cells}")
    names = [name for name in cells if name]
    texts = [*(cells[name] for name in names), *cells[None]]
    place = names.index("gpu")
    texts[place : place + 2] = [", ".join(text.strip() for text in texts[place : place + 2])]
    return dict(zip(names, texts, strict=True))


def _renamed(row: Cells, values: Values) -> Values:
    found: Values = {}
    for name in list(row):
        target = RENAMED.get(name)
        if target is None:
            continue
        column, divisor = (target, None) if isinstance(target, str) else target
        if column in values:
            row.seen.add(name)
            continue
        cell = row[name]
        if cell not in BLANK:
            found[column] = cell if divisor is None else float(cell) / divisor
    return found


def _others(row: Cells) -> str | None:
    pairs = [
        f"{name}={cell.replace('; ', ', ').replace(';', ',')}"
        for name, cell in row.items()
        if name not in row.seen
        and name not in RENAMED
        and name not in LEFT_OUT
        and cell not in BLANK
        and (name, cell) != ("source_kind", "repo")
        and "truth" not in cell  # how a row was found, which is not its source
    ]
    return "; ".join(pairs) or None


def _bytes(cell: str) -> float | None:
    """Return a cell in GiB as bytes."""
    return float(cell) * GIB if cell else None


def _ones(row: Cells, *names: str) -> Values:
    """Return these sizes; a blank one is 1."""
    return {str(RENAMED[name]): "1" if row[name] in BLANK else row[name] for name in names}


def _unshaped(row: Cells) -> None:
    """Leave out a shape that is the named model's own."""
    row.seen.update(("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "params"))


def _megatron_2020(row: Cells) -> Iterator[Values]:
    gpu, per_node = SYSTEMS_2020[row["system"]]
    hides = int(row["tp"]) > 2 and int(row["dp"]) > 1
    yield {
        "gpu": gpu,
        "gpus_per_node": min(per_node, int(row["gpus"])),
        "micro_batch_size": int(row["gbs"]) // int(row["dp"]),
        "overlap": f"tensor_parallel=false{'+data_parallel=true' if hides else ''}",
    }


def _table5(row: Cells) -> Iterator[Values]:
    for column, recompute in (
        ("iter_s_full_recompute", "full"),
        ("iter_s_present_work", "selective"),
    ):
        _unshaped(row)
        present = recompute == "selective"
        if row[column]:
            yield {
                "model": MODELS[row["model"].split()[0]],
                "run": row["model"],
                "virtual_pipeline_parallel_size": row["interleave_m"],
                "sequence_parallel": present,
                "recompute": recompute,
                "step_s": row[column],
                "mfu": float(row["mfu_pct"]) / PERCENT if present else None,
                "hfu": float(row["hfu_pct"]) / PERCENT if present and row["hfu_pct"] else None,
            }


def _table4(row: Cells) -> Iterator[Values]:
    _unshaped(row)
    experiment = row["experiment"]
    recompute = next(
        (name for name in ("full", "selective") if f"{name}_rec" in experiment), "none"
    )
    yield {
        "model": MODELS[row["model"].split()[0]],
        "num_hidden_layers": 1,
        "run": experiment,
        "recompute": recompute,
        "sequence_parallel": "sequence_parallelism" in experiment,
    }


def _activations(row: Cells) -> Iterator[Values]:
    for name in [name for name in row if name.startswith("formula")]:
        row.seen.add(name)
    figures = [name for name in row if name.startswith(("fig1_", "fig7_"))]
    row.seen.update(figures)
    for name in figures:
        if row[name]:
            unit = "%" if name.endswith("_pct") else "GiB"
            yield {
                "model": MODELS[row["model"]],
                "quantity": name,
                "value": row[name],
                "unit": unit,
                "source": row["source"],
            }


def _nanotron(row: Cells) -> Iterator[Values]:
    large = row["model"] == "8B"
    yield {
        "num_hidden_layers": 32 if large else 16,
        "hidden_size": 4096 if large else 2048,
        "intermediate_size": 14336 if large else 8192,
        "num_key_value_heads": 8 if row["variant"].startswith("gqa8") else 32,
        "tie_word_embeddings": not large,
        "num_gpus": 8 * int(row["nodes"]),
        "sequence_parallel": int(row["tp"]) > 1,
    }


def _bloom(row: Cells) -> Iterator[Values]:
    row.seen.add("vocab")
    yield {
        "model": "bloom-176b",
        "framework": row["framework"].lower(),
        "gradient_precision": row["precision"] if row["gradients"] == "16bit" else None,
    }


def _b200(row: Cells) -> Iterator[Values]:
    yield {
        "global_batch_size": int(row["micro_batch_size"])
        * int(row["num_microbatches"])
        * int(row["dp"]),
        "step_s": float(row["real_ms"]) / MILLI,
    }


def _memory(row: Cells) -> Iterator[Values]:
    sharded = row["zero"].startswith("FSDP")
    column = "reserved_bytes" if "reserved" in row["metric"] else "allocated_bytes"
    yield {
        "framework": "torch-fsdp" if sharded else "megatron-core",
        "precision": "fp8" if "float8" in row["precision"] else "bf16",
        "recompute": "none" if row["recompute"] == "1" else row["recompute"],
        "zero_stage": 3 if sharded else 1,
        "data_parallel_shard_size": row["zero"].removeprefix("FSDP") if sharded else None,
        column: float(row["peak_gib"]) * GIB,
    }


def _bridge(row: Cells) -> Iterator[Values]:
    precision, experts = bridge_precision(row), row["ep"] not in (*BLANK, "1")
    yield {
        "framework_version": row["release"].removeprefix("NeMo"),
        "precision": precision or row["precision"],
        "zero_stage": {"": None, "0": 1}.get(row["fsdp"], 3),
        "expert_capacity_factor": 1.0 if row["release"] == "25.09" and experts else None,
        "expert_parallel_size": row["ep"] if experts else None,
        **_ones(row, "cp"),
        "num_microbatches": round(float(row["num_microbatches"])),
    }


def bridge_precision(row: Mapping[str, str]) -> str | None:
    """Return what the matmuls of a row ran in: tensor-wise fp8, or the block-scaled second figure
    that the pages print for B200; None if the page does not say.
    """
    if "MX" in row["precision"] and row["system"] == "DGX-B200":
        return "mxfp8" if row["variant"] == "paren" or "(" not in row["precision"] else "fp8"
    return "fp8" if row["precision"].startswith("FP8") and row["variant"] != "paren" else None


def _recipe_run(row: Cells) -> Iterator[Values]:
    precision, scaling = FP8.get(row["precision"], (row["precision"], None))
    task, quantised = TASKS[row["task"]], row["fp8_params"] == "1" and precision in ("fp8", "mxfp8")
    row.seen.update(("grad_reduce_fp32",))
    yield {
        "precision": precision,
        "fp8_recipe": scaling,
        **(LORA if task == "lora" else {}),
        "parameter_precision": "fp8" if quantised and task != "lora" else None,
        "frozen_precision": "fp8" if quantised and task == "lora" else None,
        "optimizer_precision": "bf16" if row["model"] == "deepseek_v3" else None,
        "expert_capacity_factor": CAPACITY.get(row["token_drop"]),
        "num_nextn_predict_layers": 0 if row["mtp"] == "w/o MTP" else None,
        "zero_stage": 3 if row["fsdp"] == "1" else 1,
        **megatron_knobs(
            dispatcher=row["dispatcher"],
            overlaps_experts=row.flag("ep_overlap"),
            recompute_modules=row["recompute_modules"],
            graphs=row["cuda_graph_impl"],
            graph_modules=row["cuda_graph_modules"],
            offloaded_layers=int(row["offload_layers"] or 0),
        ),
        **_ones(row, "tp", "pp", "vp", "cp", "ep", "etp", "mbs"),
    }


def _dgxc(row: Cells) -> Iterator[Values]:
    yield {
        "framework_version": row["release"].removeprefix("v"),
        "num_hidden_layers": None if row["layers"] in ("", "32", "80") else row["layers"],
        "precision": row["precision"].lower(),
        **(_ones(row, "vp", "mbs") if row["task"] == "pretrain" else {}),
    }


def _mlperf(row: Cells) -> Iterator[Values]:
    _unshaped(row)
    lora, quantised = "lora" in row["model"], row["fp8_params"] == "1"
    row.seen.update(("layout_found",) if row["layout_found"] == "named" else ())
    yield {
        "run": f"{row['round']} {row['submitter']}",
        "gpus_per_node": min(int(row["gpus_per_node"]), int(row["gpus"])),
        "num_gpus": row["gpus"],
        "task": "lora" if lora else "pretrain",
        **({"lora_rank": 16, "lora_target_modules": "linear_qkv+linear_proj"} if lora else {}),
        "parameter_precision": "fp8" if quantised and not lora else None,
        "frozen_precision": "fp8" if quantised and lora else None,
        "overlap": "tensor_parallel=false" if row["tp_overlap"] == "0" else None,
    }


def _foundry(row: Cells) -> Iterator[Values]:
    _unshaped(row)
    checkpoints = row["activation_ckpt"] or row["activation_checkpointing"]
    yield {
        "precision": "fp8" if "fp8" in row["precision"] else "bf16",
        "zero_stage": {"FULL_SHARD": 3, "SHARD_GRAD_OP": 2}[row["sharding"]],
        "recompute": "full" if checkpoints == "True" else "none",
        "offload": "activations" if row["activation_cpu_offload"] == "True" else None,
    }


def _titan(row: Cells) -> Iterator[Values]:
    failed = row["tps_per_gpu"] == "OOM"
    yield {
        "precision": "fp8" if "float8" in row["precision"] else row["precision"],
        "status": "out_of_memory" if failed else "ran",
        "tokens_per_second_per_gpu": None if failed else row["tps_per_gpu"],
        "reserved_bytes": _bytes("" if failed else row["mem_gib"]),
    }


def _trl(row: Cells) -> Iterator[Values]:
    kernel = row["attention_kernel"].split()[0]
    yield {"attention_kernel": {"flash-attention-2": "fa2"}.get(kernel, kernel)}


def _internevo(row: Cells) -> Iterator[Values]:
    shard, replicas = int(row.get("optimizer_shard_gpus") or 0), int(row["dp"])
    repeated = row["figure_also_printed_unpacked"] == "1"
    yield {
        "framework": row["framework"].lower(),
        "gpus_per_node": min(int(row["gpus_per_node"]), int(row["gpus"])),
        "data_parallel_shard_size": shard if shard < replicas else 0,
        "sequence_parallel": row["sp"] == "1",
        **({"run": "figure also printed unpacked"} if repeated else {}),
    }


def _fms(row: Cells) -> Iterator[Values]:
    frozen = {"none": None, "gptq-4bit": "int4"}.get(
        row["base_quantisation"], row["base_quantisation"]
    )
    task = TASKS.get(row["task"], row["task"])
    shards = row["parallel"].startswith("FSDP")
    # accelerate widens the parameters that FSDP trains in mixed precision.
    widened = shards and row["autocast"] != "none" and task == "sft"
    width = {"float16": "fp16", "bfloat16": "bf16"}[row["torch_dtype"]]
    # PEFT looks for all names, and GPTBigCode has only c_attn of them.
    fused_name = row["lora_targets"] and row["model"].startswith("santacoder")
    targets = "linear_qkv" if fused_name else row["lora_targets"].removesuffix("+c_attn")
    padded = round(float(row["mean_tokens_per_sample"])) if row["mean_tokens_per_sample"] else None
    yield {
        **SHAPES.get(row["model"], {}),
        "task": "lora" if task == "qlora" else task,
        "sequence_length": row["seq_tokens"] or padded,
        "precision": width,
        "parameter_precision": ("fp32" if widened else width) if task == "sft" else None,
        "frozen_precision": frozen,
        "lora_target_modules": targets or None,
        "lora_dropout": 0.1 if row["lora_rank"] else None,
        "kernel_fusion": row["fused_rms_norm"] == "1",
        "cross_entropy": {
            "fused cross entropy kernel": "fused",
            "liger fused linear cross entropy": "chunked",
        }.get(row["fused_loss"], "unfused"),
        "zero_stage": 3 if shards else 0,
        "recompute": "full" if row["gradient_checkpointing"] == "1" else "none",
    }


def _product(*cells: str) -> int | None:
    """Return the product of counts; None if one is blank."""
    return math.prod(map(int, cells)) if all(cells) else None


def _swift(row: Cells) -> Iterator[Values]:
    megatron = row["tool"] == "Megatron-SWIFT"
    row.seen.update(("nproc_per_node", "gpus_stated"))
    accumulated = row["gradient_accumulation_steps"]
    if accumulated.startswith("$(expr"):
        accumulated = str(16 // int(row["gpus"]))  # $(expr 16 / $nproc_per_node)
    each = row["per_device_train_batch_size"] or row["micro_batch_size"]
    deepspeed = row["deepspeed"]
    yield {
        "framework": "ms-swift" if megatron else "deepspeed" if deepspeed else "hf-trainer",
        "micro_batch_size": each or None,
        "num_microbatches": accumulated or None,
        "global_batch_size": row["global_batch_size"] or _product(each, accumulated, row["gpus"]),
        "precision": row["precision"] or "bf16",
        "frozen_precision": "nf4" if row["quant_method"] == "bnb" else row["quant_method"] or None,
        "lora_target_modules": TARGETS["all"] if row["lora_rank"] else None,
        "lora_dropout": 0.05 if row["lora_rank"] else None,
        "cross_entropy": "fused"
        if row["cross_entropy_loss_fusion"] == "true"
        else "chunked"
        if row["use_liger_kernel"] == "true"
        else None,
        "kernel_fusion": True if row["use_liger_kernel"] == "true" else None,
        "zero_stage": deepspeed.removeprefix("zero")
        or (3 if "fsdp" in row["script"] else None if megatron else 0),
        "recompute": row["recompute_granularity"]
        or (None if megatron else "none" if row["gradient_checkpointing"] == "false" else "full"),
    }


QUANTISED = {"bnb.nf4": "nf4", "bnb.nf4-dq": "nf4", "gptq int4": "int4", "none": ""}
TORCHTUNE_LORA = {"Llama 3.1 8B": 8, "Llama 3.2 3B": 64}
"""Ranks in recipes/configs/llama3_1/8B_lora_single_device.yaml and llama3_2/3B_..., whose targets
are the same.
"""
TORCHTUNE_TARGETS = "q_proj+v_proj+o_proj+gate_proj+up_proj+down_proj"


def _whole_batch(row: Cells) -> int | None:
    """Return the sequences of one step: micro-batches that a row leaves out count as one."""
    if not row["mbs"] or row["tp"] not in ("", "1") or row["pp"] not in ("", "1"):
        return None
    return int(row["mbs"]) * int(row["grad_accum"] or 1) * int(row["gpus"] or 1)


def _deepspeed_stage(row: Cells) -> int | None:
    """Return the stage of ZeRO that Qwen's scripts start: 3 for full fine-tuning, 2 for LoRA on
    several GPUs and for QLoRA.
    """
    if row["table"] != "Qwen fine-tuning profile":
        return None
    if row["task"] == "sft full":
        return 3
    return 2 if row["task"] == "qlora" or int(row["gpus"]) > 1 else None


def _trainer(row: Cells) -> Iterator[Values]:
    names = {
        "transformers Trainer (Qwen finetune.py)": "hf-trainer",
        "torchtitan (FSDP2)": "torchtitan",
        "NeMo AutoModel (FSDP2)": "nemo-automodel",
        "fms-fsdp (PyTorch FSDP)": "fms-fsdp",
        "peft's own loop (one optimizer step a batch)": "peft",
    }
    metric = row["memory_metric"]
    if row["trainer"] == "torchtune" and metric in ("peak", "peak active"):
        metric = "peak allocated"  # training.get_memory_stats: max_memory_active
    column = next(
        (
            f"{word}_bytes"
            for word in ("allocated", "reserved")
            if metric.startswith(f"peak {word}")
        ),
        "used_bytes",
    )
    task = TASKS.get(row["task"], row["task"])
    quantisation = row["quantisation"]
    trainer = names.get(row["trainer"], row["trainer"])
    adapted = TORCHTUNE_LORA.get(row["model"]) if "lora" in task else None
    adapted = adapted if trainer == "torchtune" else None
    row.seen.add("release")
    yield {
        **SHAPES.get(row["model"], {}),
        "framework": "deepspeed" if _deepspeed_stage(row) else trainer,
        "global_batch_size": row["gbs"] or _whole_batch(row),
        "task": "lora" if task == "qlora" else task,
        "sequence_length": round(float(row["seq_tokens"] or row["max_seq_tokens"] or 0)) or None,
        "precision": {"bf16-true": "bf16", "bf16 (weights too)": "bf16"}.get(
            row["precision"], row["precision"]
        ),
        "frozen_precision": QUANTISED.get(quantisation, quantisation) or None,
        "kernel_fusion": True if row["torch_compile"] == "1" else None,
        "cross_entropy": {
            "cross entropy": "unfused",
            "chunked cross entropy": "chunked",
            "masked cross entropy (unfused)": "unfused",
        }.get(row["loss"], "chunked" if trainer == "torchtune" else None),
        "zero_stage": _deepspeed_stage(row) or (3 if int(row["gpus"] or 1) > 1 else None),
        "lora_rank": row["lora_rank"] or adapted,
        "lora_target_modules": TARGETS.get(row["lora_targets"], row["lora_targets"])
        or (TORCHTUNE_TARGETS if adapted else None),
        "moe_token_dispatcher_type": "flex"
        if row["dispatcher"] in ("deepep", "hybridep")
        else None,
        column: _bytes(row["memory_gib"]),
    }


def _served(row: Cells) -> Iterator[Values]:
    pools = {
        f"{pool}_{column}": row[f"{pool}_{name}"] or None
        for pool in ("prefill", "decode")
        for name, column in (
            ("batch_size", "batch_size"),
            ("num_workers", "replicas"),
            ("tp_size", "tensor_parallel_size"),
            ("pp_size", "pipeline_parallel_size"),
            ("attention_dp_size", "attention_data_parallel_size"),
            ("moe_tp_size", "moe_tensor_parallel_size"),
            ("moe_ep_size", "expert_parallel_size"),
        )
    }
    drawn = (row["isl"], row["osl"]) in INFERENCEMAX and bool(row["measured"])
    row.seen.add("precision")  # gemm_quant says more
    yield {
        **pools,
        "precision": SHIPPED.get(row["model"]) or SERVED_PRECISIONS[row["gemm_quant"]],
        "client": "inferencemax" if drawn else None,
        "concurrency": row["concurrency"] or row["batch"],
        "disaggregated": row["mode"] == "disagg",
        "expert_parallel_size": int(row["moe_ep"] or 0) or None,
        "moe_tensor_parallel_size": int(row["moe_tp"] or 0) or None,
    }


def _as_started(row: Cells) -> Iterator[Values]:
    row.seen.update(("mode", "concurrency_measured", "expert_parallel", "dp_attention"))
    yield {
        "client": row["client"].partition(" (")[0],
        "num_prompts": row["num_prompts"] or row["prompts_completed"] or None,
    }


def _rl_nemo(row: Cells) -> Iterator[Values]:
    others = 0 if row["colocated"] == "1" else int(row["gen_gpus"])
    yield {"training_gpus": int(row["gpus"]) - others}


def _rl_verl(row: Cells) -> Iterator[Values]:
    colocated = "colocated" in row["mode"]
    yield {"mode": "sync" if colocated else "async", "colocated": colocated}


def _speed_of_one(row: Cells) -> Iterator[Values]:
    yield {"precision": row["weight_quantisation"].lower().rpartition("-")[2]}


def _cache(row: Cells) -> Iterator[Values]:
    yield {"hybrid_or_window": row["hybrid_or_window"] == "1"}


def _shape_of_model(row: Cells) -> Iterator[Values]:
    yield {"from_memory": "memory" in row["source_kind"]}


RECIPES = {"gradient_precision": "bf16", "cross_entropy": "in_place", "framework": "megatron-core"}
AUDITED = {**RECIPES, "cross_entropy": "fused"}
SOFTWARE_2022 = {
    "framework": "megatron-core",
    "precision": "fp16",
    "attention": "unfused",
    "dropout": 0.1,
}
PRESET = (
    "precision task recompute_modules recompute_num_layers cuda_graph_impl overlap_grad_reduce "
    "overlap_param_gather framework_version=release preset=name use_megatron_fsdp=fsdp "
    "moe_token_dispatcher_type=dispatcher moe_flex_dispatcher_backend=flex_backend "
    "overlap_moe_expert_parallel_comm=ep_overlap cpu_offloading_num_layers=offload_layers"
)
MLPERF = Format(
    columns=(
        "model gpu precision fp8_recipe cuda_graphs recompute sequence_parallel=sp "
        "zero_stage=zero moe_token_dispatcher_type=dispatcher allocated_bytes=peak_allocated_gib"
    ),
    assumed=AUDITED,
    rows=_mlperf,
)
FOUNDRY = Format(
    columns="model gpu",
    assumed={
        "framework": "torch-fsdp",
        "gradient_precision": "bf16",
        "cross_entropy": "fused",
        "attention_kernel": "triton",
    },
    rows=_foundry,
)
RECIPE_RUN = Format(
    columns="model gpu task run=recipe framework_version=release",
    assumed=RECIPES,
    rows=_recipe_run,
)
SERVED = Format(
    columns="model gpu=system run=id input_length=isl output_length=osl",
    assumed={"load": "closed"},
    rows=_served,
)
QUEUED = Format(
    columns="model gpu precision=weights kv_cache_precision=kv_cache client=runner",
    assumed={"load": "offline"},
)
FORMATS: Mapping[str, Format] = {
    "megatron_lm_2020_scaling": Format(
        columns=(
            "num_hidden_layers=layers hidden_size=hidden num_attention_heads=heads model=case "
            "run=system"
        ),
        assumed={
            **SOFTWARE_2022,
            "max_position_embeddings": 1024,
            "vocab_size": 51200,
            "gradient_precision": "fp16",
            "sequence_parallel": False,
            "recompute": "full",
            "zero_stage": 0,
        },
        rows=_megatron_2020,
    ),
    "korthikanti2022_table5": Format(
        columns="gpu", assumed={**SOFTWARE_2022, "zero_stage": 0}, rows=_table5
    ),
    "korthikanti2022_table4": Format(
        assumed={**SOFTWARE_2022, "gpu": "a100-sxm-80gb"}, rows=_table4
    ),
    "korthikanti2022_fig1_fig7_memory": Format(assumed={"gpu": "a100-sxm-80gb"}, rows=_activations),
    "narayanan2021_days": Format(
        columns="model gpu value=days",
        assumed={"quantity": "days to train", "unit": "d"},
    ),
    "grid_h100_nanotron": Format(
        columns="model variant status zero_stage=zero used_bytes=mem_gb",
        assumed={
            "framework": "nanotron",
            "gpu": "h100-sxm-80gb",
            "gpus_per_node": 8,
            "sequence_length": 4096,
            "num_attention_heads": 32,
            "vocab_size": 131072,
            "gated_mlp": True,
            "normalization": "rmsnorm",
            "precision": "bf16",
            "source": "huggingface.co/datasets/nanotron/ultrascale-playbook-data",
        },
        rows=_nanotron,
    ),
    "grid_a100_bloom": Format(
        columns=(
            "num_hidden_layers=layers hidden_size=hidden num_attention_heads=heads gpu precision "
            "recompute status variant=nominal_size intermediate_size=ffn sequence_parallel=sp "
            "zero_stage=zero"
        ),
        assumed={"attention": "unfused", "inter_node_bandwidth_bytes_per_second": 4 * 12.5e9 / 8},
        rows=_bloom,
    ),
    "memory_b200_megatron": Format(
        columns=(
            "model gpu num_hidden_layers precision run=case allocated_bytes=real_alloc_gib "
            "reserved_bytes=real_reserved_gib"
        ),
        assumed={
            "framework": "megatron-core",
            "cross_entropy": "fused",
            "overlap": "+".join(
                f"{name}_parallel=false"
                for name in ("tensor", "context", "expert", "pipeline", "data")
            ),
        },
        rows=_b200,
    ),
    "memory_measured": Format(columns="model gpu=system", rows=_memory),
    "training_megatron_bridge": Format(
        columns="model gpu=system task", assumed=AUDITED, rows=_bridge
    ),
    "training_megatron_bridge_recipes": RECIPE_RUN,
    "training_megatron_bridge_recipes_2": RECIPE_RUN,
    "training_dgxc": Format(columns="model gpu=system task", assumed=AUDITED, rows=_dgxc),
    **dict.fromkeys(("training_mlperf", "training_mlperf_2", "mlperf_v6"), MLPERF),
    **dict.fromkeys(("training_llm_foundry_fsdp", "training_llm_foundry_h100"), FOUNDRY),
    "training_torchtitan": Format(
        columns="model gpu=hw run=table data_parallel_size=fsdp recompute=ac",
        assumed={"framework": "torch-fsdp", "zero_stage": 3},
        rows=_titan,
    ),
    "training_trl_long": Format(
        columns=("model gpu precision cross_entropy=loss context_parallel_size=gpus num_gpus=gpus"),
        assumed={
            "framework": "torch-fsdp",
            "task": "sft",
            "global_batch_size": 1,
            "recompute": "full",
            "offload": "activations",
        },
        rows=_trl,
    ),
    "training_internevo": Format(
        columns=(
            "num_hidden_layers=layers hidden_size=hidden num_attention_heads=heads "
            "intermediate_size=ffn vocab_size=vocab model gpu precision recompute num_gpus=gpus "
            "zero_stage=zero"
        ),
        assumed={"gated_mlp": True, "normalization": "rmsnorm", "tie_word_embeddings": False},
        rows=_internevo,
    ),
    "schedules_primus": Format(
        columns="model gpu status run=schedule pipeline_schedule=schedule",
        assumed={"framework": "primus"},
    ),
    "trainer_fms_a100": Format(
        columns=(
            "model gpu lora_rank status expert_parallel_size=expert_parallel "
            "allocated_bytes=peak_allocated_gib used_bytes=nvidia_smi_used_gib"
        ),
        assumed={"framework": "hf-trainer", "attention_kernel": "fa2"},
        rows=_fms,
    ),
    "trainer_ms_swift": Format(
        columns=(
            "model gpu task lora_rank sequence_parallel run=script num_gpus=gpus "
            "sequence_length=max_length tensor_parallel_size=tensor_model_parallel_size "
            "pipeline_parallel_size=pipeline_model_parallel_size "
            "expert_parallel_size=expert_model_parallel_size used_bytes=peak_gib"
        ),
        assumed={"status": "ran"},
        rows=_swift,
    ),
    "trainer_small_tables": Format(
        columns=("model gpu status sequence_parallel run=table recompute=activation_checkpointing"),
        rows=_trainer,
    ),
    "inference_measured": SERVED,
    **{f"inference_measured_{number}": SERVED for number in (2, 3, 4)},
    "inference_trtllm_throughput": QUEUED,
    "inference_trtllm_throughput_2": QUEUED,
    "serving_as_started": Format(
        columns="model precision gpu=system run=id statistic=stat",
        assumed={"load": "closed"},
        rows=_as_started,
    ),
    "serving_qwen3_h20": Format(
        columns=(
            "model gpu run=weight_quantisation concurrency=batch request_latency_s=time_s "
            "output_tokens_per_second=generated_tokens_s"
        ),
        assumed={"load": "closed"},
        rows=_speed_of_one,
    ),
    "kv_cache_counts": Format(
        columns=(
            "model gpu checkpoint max_model_len max_num_seqs block_size max_num_batched_tokens "
            "max_concurrency precision=weight_quantisation kv_cache_precision=kv_dtype "
            "kv_cache_tokens=kv_tokens kv_cache_blocks=kv_blocks status=outcome "
            "device_memory_bytes=gpu_memory_gib kv_cache_bytes=kv_cache_gib "
            "weights_bytes=weights_gib non_torch_bytes=non_torch_gib "
            "activations_bytes=activation_peak_gib"
        ),
        rows=_cache,
    ),
    "rl_nemo": Format(
        columns=(
            "model gpu algorithm mode colocated generation_precision prompts_per_step "
            "generations_per_prompt rollouts_per_step recompute num_gpus=gpus "
            "framework_version=release staleness=steps_off_policy precision=training_precision "
            "max_sequence_length=max_seq_tokens mean_sequence_length=mean_seq_tokens "
            "global_batch_size=train_gbs micro_batch_size=train_mbs tensor_parallel_size=train_tp "
            "pipeline_parallel_size=train_pp context_parallel_size=train_cp "
            "expert_parallel_size=train_ep sequence_parallel=train_sp generation_gpus=gen_gpus "
            "generation_tensor_parallel_size=gen_tp generation_pipeline_parallel_size=gen_pp "
            "memory_fraction=gen_gpu_memory_utilization"
        ),
        assumed={"framework": "nemo-rl"},
        rows=_rl_nemo,
    ),
    "rl_verl": Format(
        columns=(
            "model gpu algorithm staleness logprob_s update_s prompts_per_step "
            "generations_per_prompt rollouts_per_step max_prompt_length=max_prompt_tokens "
            "max_response_length=max_response_tokens tensor_parallel_size=train_tp "
            "context_parallel_size=train_sp_ulysses training_gpus=train_gpus "
            "generation_gpus=gen_gpus generation_tensor_parallel_size=gen_tp "
            "generation_s=gen_wait_s"
        ),
        assumed={"framework": "verl"},
        rows=_rl_verl,
    ),
    "recipe_settings_by_release": Format(columns=f"{PRESET} model gpu=system"),
    "recipes_nvidia": Format(columns=f"{PRESET} model gpu"),
    "model_shapes": Format(
        columns=(
            "num_hidden_layers=layers hidden_size=hidden num_attention_heads=heads "
            "intermediate_size=ffn vocab_size=vocab model head_dim gated_mlp "
            "num_key_value_heads=kv_heads num_experts=experts num_experts_per_tok=topk "
            "moe_intermediate_size=moe_ffn num_shared_experts=shared_experts "
            "first_k_dense_replace=first_dense_layers max_position_embeddings=seq"
        ),
        rows=_shape_of_model,
    ),
}
"""The collected tables, by the names of their files."""

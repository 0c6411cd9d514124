"""Compare predicted KV-cache sizes with those that engines printed at startup: `python -m
benchmarks.accuracy.kv_cache [--data DIR] [--json]`.

vLLM's reserved memory was fitted to runs that print its parts (`fits.yaml`); SGLang's rule comes
from its source code. One constant was fitted to a row of this comparison: the NCCL multicast (NVLS)
buffer, to two caches of Qwen3-235B printed by vLLM and SGLang, of which SGLang's is compared here.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.accuracy.comparison import Comparison
from benchmarks.accuracy.data import print_report, rows
from benchmarks.accuracy.groups import Rows, as_groups
from evidence.table import Row
from hp_tool.catalog import library
from hp_tool.catalog.releases import check_release
from hp_tool.cost.serving.candidates import ServingCandidates
from hp_tool.domain.serving import KvCache
from hp_tool.errors import InputError
from hp_tool.questions import schema
from hp_tool.questions.serving.estimates import kv_cache
from hp_tool.questions.serving.evaluate import resolve_config
from hp_tool.questions.serving.problem import resolve_serving, with_device_defaults

GIB = 1 << 30
OTHER_GPUS = {"A6000 48GB": 47.5, "RTX 3090": 23.57, "T4 16GB": 14.56}
"""Memory in GiB, as reported by drivers, of GPUs that the catalogue does not have."""
STANDS_IN = "a100-sxm-80gb"
"""Catalogue GPU that replaces such a GPU. Its other properties do not affect the cache."""
PRECISIONS = {
    "int8 w8a8": "int8",
    "none": "bf16",
    "none (fp16)": "bf16",
    "int4 gptq": "int4",
    "int4 marlin": "int4",
    "int4 awq": "int4",
    "nvfp4, part fp8": "nvfp4",
}
CACHES = {"int8 per token and head": "fp8"}
PRINTED_GRAPHS = "2026-05", "0.21.0"
"""First month whose vLLM builds estimate CUDA graphs before they size the cache; the vLLM release
used for runs of this month and later that state no release.
"""
CLOSE = 0.1


def comparisons(folder: Path) -> Iterator[Comparison]:
    """Yield the comparisons of the rows whose model is in the catalogue."""
    for row in rows(folder, "kv_cache_counts"):
        if library.has_entry("models", row["model"]):
            yield _comparison(row)


def _comparison(row: Row) -> Comparison:
    cache = predict_cache(row)
    release = _release(row)
    return Comparison(
        source=row["source"],
        model=row["model"],
        what="cache",
        published=row["kv_cache_tokens"],
        predicted=cache.tokens.expected,
        low=cache.tokens.low,
        high=cache.tokens.high,
        gpu=row["gpu"],
        part=f"{row['engine']} {release or 'of a release not told'}"
        + (", layers unlike" if row["hybrid_or_window"] else ""),
    )


def _release(row: Row) -> str | None:
    found = re.search(r"\d+\.\d+(\.\d+)?", row["engine_version"] or "")
    month, release = PRINTED_GRAPHS
    if found is None and row["engine"] == "vllm" and (row["date"] or "") >= month:
        return release
    return found[0] if found else None


def _accepted_release(row: Row) -> str | None:
    """Return the row's release if queries accept it. Some rows are older than the first release
    that queries accept.
    """
    release = _release(row)
    try:
        check_release(row["engine"], release or "", field="")
    except InputError:
        return None
    return release


def predict_cache(row: Row) -> KvCache:
    """Return the predicted KV cache of one replica of the row."""
    own = library.has_entry("gpus", row["gpu"])
    t = row["tensor_parallel_size"] or 1
    query = schema.parse_query(
        {
            "kind": "inference",
            "model": row["model"],
            "cluster": {"gpu": row["gpu"] if own else STANDS_IN, "num_gpus": t},
            "inference": {
                "input_length": 1000,
                "output_length": 100,
                "concurrency": 1,
                "engine": row["engine"],
                "precision": PRECISIONS.get(row["precision"], row["precision"]),
                "kv_cache_precision": CACHES.get(row["kv_cache_precision"])
                or row["kv_cache_precision"]
                or "bf16",
            }
            | _drafts(row)
            | _without_none(
                memory_fraction=row["memory_fraction"],
                engine_version=_accepted_release(row),
                max_model_len=row["max_model_len"],
            ),
            "parallel": {"tensor_parallel_size": t}
            | _without_none(
                max_num_seqs=row["max_num_seqs"],
                max_num_batched_tokens=row["max_num_batched_tokens"],
            ),
        }
    )
    problem = resolve_serving(query)
    device = row["device_memory_bytes"] or (None if own else OTHER_GPUS[row["gpu"]] * GIB)
    gpu = problem.cluster.gpu
    if device is not None:
        gpu = dataclasses.replace(gpu, memory_bytes=int(device), silicon=None)
    engine = with_device_defaults(
        problem.engine, gpu=gpu, release=_release(row), model=problem.model
    )
    if row["memory_fraction"]:
        engine = dataclasses.replace(engine, memory_fraction=row["memory_fraction"])
    cluster = dataclasses.replace(problem.cluster, gpu=gpu)
    problem = dataclasses.replace(problem, cluster=cluster, engine=engine)
    config = resolve_config(query.parallel, problem=problem)
    one = ServingCandidates.from_configs([config], concurrency=[1])
    return kv_cache(problem, one, 0)


def _drafts(row: Row) -> dict[str, Any]:
    """Return the speculative decoding of a row that drafts with the model's own layers or
    assistant. Rows describe other draft models too briefly to compute their memory.
    """
    found = re.search(r"speculative_draft=MTP ?(\d*)", row["other"] or "")
    if found is None:
        return {}
    drafted = {
        "num_speculative_tokens": int(found[1] or 1),
        "acceptance_rate": 0.7,
        "draft_cost_fraction": 0.1,
    }
    return {"speculative": drafted}


def _without_none(**values: object) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value}


def by_title(folder: Path) -> Rows:
    """Return the rows by group: models whose layers are equal, and all others."""
    alike, unlike = "KV cache sizes that engines report", "windows and recurrent layers"
    found: Rows = {alike: [], f"{alike}, {unlike}": []}
    for row in comparisons(folder):
        found[f"{alike}, {unlike}" if "unlike" in row.part else alike].append(row)
    return found


def evaluate(folder: Path) -> dict[str, Any]:
    """Return the groups, and for each group the number of rows within CLOSE and within their
    interval.
    """
    found = as_groups(by_title(folder))
    near = {
        group.title: {
            "rows": len(group.rows),
            "within_tenth": sum(abs(row.error) <= CLOSE for row in group.rows),
            "inside": sum(row.low <= row.published <= row.high for row in group.rows),  # type: ignore[operator]
        }
        for group in found
    }
    return {"groups": found, "near": near}


def as_dict(report: dict[str, Any]) -> dict[str, Any]:
    """Return the report as a JSON value."""
    return report | {"groups": [group.as_dict() for group in report["groups"]]}


if __name__ == "__main__":
    print_report(description=__doc__, evaluate=evaluate, as_dict=as_dict)

"""Figures 1 and 7 of arXiv 2205.05198: activation memory of the first stage, with and without its
two techniques.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.accuracy.comparison import Comparison
from benchmarks.accuracy.data import rows
from benchmarks.accuracy.korthikanti import GPU, SOFTWARE_2022
from benchmarks.accuracy.published import answer
from hp_tool.domain.units import GIB

SIZES = {
    # model: (pipeline parallel, model chunks, micro-batch, batch) of table 3; tensor parallel 8
    "gpt-22b": (1, 1, 4, 4),
    "gpt3-175b": (8, 3, 1, 64),
    "mt-nlg-530b": (35, 3, 1, 280),
    "gpt-1t": (64, 1, 1, 512),
}

VARIANTS = {
    # quantity: (recompute, sequence parallel)
    "fig1_act_gib_tp_baseline": ("none", False),
    "fig1_act_gib_sp_selective": ("selective", True),
    "fig7_sp_pct": ("none", True),
    "fig7_selective_pct": ("selective", False),
    "fig7_sp_selective_pct": ("selective", True),
    "fig7_full_recompute_pct": ("full", False),
}


def figures(folder: Path) -> list[Comparison]:
    """Layers' activations in GiB (figure 1) and as a share of the tensor-parallel baseline's
    (figure 7).
    """
    comparisons = []
    for row in rows(folder, "korthikanti2022_fig1_fig7_memory"):
        name = row["quantity"]
        if name not in VARIANTS:
            continue
        recompute, sharded = VARIANTS[name]
        size = _layers(row["model"], recompute=recompute, sequence_parallel=sharded)
        baseline = _layers(row["model"], recompute="none", sequence_parallel=False)
        share = row["unit"] == "%"
        comparisons.append(
            Comparison(
                source="Figure 7 (%)" if share else "Figure 1 (GiB)",
                model=row["model"],
                what=name,
                published=row["value"],
                predicted=100.0 * size / baseline if share else size / GIB,
            )
        )
    return comparisons


def _layers(name: str, *, recompute: str, sequence_parallel: bool) -> float:
    pipeline, chunks, micro_batch, batch = SIZES[name]
    memory = answer(
        {
            "model": name,
            "cluster": {"gpu": GPU, "num_gpus": 8 * pipeline},
            "training": {**SOFTWARE_2022, "global_batch_size": batch},
            "parallel": {
                "tensor_parallel_size": 8,
                "pipeline_parallel_size": pipeline,
                "virtual_pipeline_parallel_size": chunks,
                "micro_batch_size": micro_batch,
                "recompute": recompute,
                "sequence_parallel": sequence_parallel,
            },
        }
    ).memory
    assert memory is not None
    return memory.layer_activations_bytes

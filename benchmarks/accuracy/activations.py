"""Figures 1 and 7 of arXiv 2205.05198: activation memory of the first stage, with and without its
two techniques.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.accuracy.comparison import Comparison
from benchmarks.accuracy.data import read
from benchmarks.accuracy.korthikanti import MODELS, workload
from hp_tool.domain.hardware import ClusterQuery
from hp_tool.domain.parallel import ParallelQuery
from hp_tool.domain.query import Query
from hp_tool.domain.units import GIB
from hp_tool.questions.training import estimate

SIZES = {
    # model: (pipeline parallel, model chunks, micro-batch, batch) of table 3; tensor parallel 8
    "22B": (1, 1, 4, 4),
    "175B": (8, 3, 1, 64),
    "530B": (35, 3, 1, 280),
    "1T": (64, 1, 1, 512),
}

VARIANTS = {
    # column: (recompute, sequence parallel)
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
    for row in read(folder, "korthikanti2022_fig1_fig7_memory.csv"):
        baseline = _layers(row["model"], recompute="none", sequence_parallel=False)
        reduced = _layers(row["model"], recompute="selective", sequence_parallel=True)
        for column, size in (
            ("fig1_act_gib_tp_baseline", baseline),
            ("fig1_act_gib_sp_selective", reduced),
        ):
            comparisons.append(
                _comparison("Figure 1 (GiB)", row["model"], column, float(row[column]), size / GIB)
            )
        for column, (recompute, sharded) in VARIANTS.items():
            share = (
                100.0
                * _layers(row["model"], recompute=recompute, sequence_parallel=sharded)
                / baseline
            )
            comparisons.append(
                _comparison("Figure 7 (%)", row["model"], column, float(row[column]), share)
            )
    return comparisons


def _layers(size: str, *, recompute: str, sequence_parallel: bool) -> float:
    pipeline, chunks, micro_batch, batch = SIZES[size]
    query = Query(
        kind="training",
        model=MODELS[size],
        cluster=ClusterQuery(gpu="a100-sxm-80gb", num_gpus=8 * pipeline),
        training=workload(batch),
        parallel=ParallelQuery(
            tensor_parallel_size=8,
            pipeline_parallel_size=pipeline,
            virtual_pipeline_parallel_size=chunks,
            micro_batch_size=micro_batch,
            recompute=recompute,
            sequence_parallel=sequence_parallel,  # type: ignore[arg-type]
        ),
    )
    memory = estimate(query=query).memory
    assert memory is not None
    return memory.layer_activations_bytes


def _comparison(
    source: str, size: str, what: str, published: float, predicted: float
) -> Comparison:
    return Comparison(
        source=source, model=MODELS[size], what=what, published=published, predicted=predicted
    )

"""Strong scaling in MLPerf's rounds: GPU-seconds a sequence on many GPUs against those on the
fewest of the same series.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from pathlib import Path

from benchmarks.accuracy.comparison import Comparison
from benchmarks.accuracy.data import rows
from benchmarks.accuracy.prepared import Prepared
from benchmarks.accuracy.runs import mlperf_cases
from evidence.table import Row
from hp_tool.catalog.efficiency import efficiency

SERIES = ("model", "gpu", "date", "micro_batch_size")
"""What runs of a series share. Submitters and layouts differ along it: most have one size alone."""


def ratios(folder: Path) -> list[Comparison]:
    """For each run with more GPUs than the fewest of its series: how much more of them a sequence
    takes, published and predicted by the shipped constants. What both ends have in common (kernels,
    clocks, the release) cancels.
    """
    grouped: dict[tuple[object, ...], list[tuple[Row, Comparison]]] = defaultdict(list)
    for row, case in zip(rows(folder, "training_mlperf"), mlperf_cases(folder), strict=False):
        run = Prepared.of(case)
        share = row["num_gpus"] / row["global_batch_size"]
        comparison = run.compare(efficiency(gpu=run.gpu, framework="megatron-core").framework)
        each = dataclasses.replace(
            comparison,
            published=comparison.published * share,
            predicted=comparison.predicted * share,
        )
        grouped[tuple(row[key] for key in SERIES)].append((row, each))
    return [one for members in grouped.values() for one in _against_fewest(members)]


def _against_fewest(members: list[tuple[Row, Comparison]]) -> list[Comparison]:
    fewest = min(row["num_gpus"] for row, _ in members)
    base = [one for row, one in members if row["num_gpus"] == fewest]
    published, predicted = (
        sum(getattr(one, name) for one in base) / len(base) for name in ("published", "predicted")
    )
    return [
        dataclasses.replace(
            one,
            what=f"{one.what}, against x{fewest}",
            published=one.published / published,
            predicted=one.predicted / predicted,
            low=None,
            high=None,
        )
        for row, one in members
        if row["num_gpus"] > fewest
    ]

"""Strong scaling in MLPerf's rounds: GPU-seconds a sequence on many GPUs against those on the
fewest of the same series.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from pathlib import Path

from benchmarks.accuracy.comparison import Comparison
from benchmarks.accuracy.data import Row, read
from benchmarks.accuracy.mlperf_runs import mlperf_cases
from benchmarks.accuracy.prepared import Prepared
from hp_tool.catalog.efficiency import efficiency

SERIES = ("model", "gpu", "round", "mbs")
"""What runs of a series share. Submitters and layouts differ along it: most have one size alone."""


def ratios(folder: Path) -> list[Comparison]:
    """For each run with more GPUs than the fewest of its series: how much more of them a sequence
    takes, published and predicted by the shipped constants. What both ends have in common (kernels,
    clocks, the release) cancels.
    """
    grouped: dict[tuple[str, ...], list[tuple[Row, Comparison]]] = defaultdict(list)
    for row, case in zip(read(folder, "training_mlperf.csv"), mlperf_cases(folder), strict=False):
        run = Prepared.of(case)
        share = int(row["gpus"]) / int(row["gbs"])
        comparison = run.compare(efficiency(gpu=run.gpu, framework="megatron-core").framework)
        each = dataclasses.replace(
            comparison,
            published=comparison.published * share,
            predicted=comparison.predicted * share,
        )
        grouped[tuple(row[key] for key in SERIES)].append((row, each))
    return [one for members in grouped.values() for one in _against_fewest(members)]


def _against_fewest(members: list[tuple[Row, Comparison]]) -> list[Comparison]:
    fewest = min(int(row["gpus"]) for row, _ in members)
    base = [one for row, one in members if int(row["gpus"]) == fewest]
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
        if int(row["gpus"]) > fewest
    ]

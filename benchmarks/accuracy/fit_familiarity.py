"""List the measured runs behind the constants: `python -m evidence.fit --only familiarity`.

Writes hp_tool/catalog/data/efficiency/measured_runs.csv, one line for each group of runs with equal
settings. Runs of frameworks and engine releases without separate constants are excluded: a query
about them gets the interval for unfamiliar software.
"""

from __future__ import annotations

import csv
import dataclasses
import io
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.accuracy.data import rows
from benchmarks.accuracy.fit_experts import moe_runs
from benchmarks.accuracy.serving_runs import cached_series, dense_runs, setting_of
from evidence.cases import DEFAULT_LABEL, LABELS, missing_fields, step_s, training_query
from evidence.table import FILE_OF, Row
from hp_tool.catalog import gpu
from hp_tool.catalog.efficiency import engine_profiles, frameworks
from hp_tool.catalog.familiarity import COLUMNS, FILE
from hp_tool.cost.uncertainty import training_setting
from hp_tool.domain.familiarity import Measured, Setting
from hp_tool.errors import HpToolError
from hp_tool.questions.training.problem import resolve_model

Group = tuple[str, Measured]
"""(kind of query, settings of a group of measured runs)."""


def groups(folder: Path) -> list[Group]:
    """Return every group of measured runs, in a fixed order."""
    trained = _grouped(_trainings(folder))
    served = _grouped(_servings(folder))
    return [*(("training", run) for run in trained), *(("serving", run) for run in served)]


def _trainings(folder: Path) -> Iterator[tuple[Setting, str]]:
    known = set(frameworks())
    for table, file in FILE_OF.items():
        if not file.startswith("training/"):
            continue
        for row in rows(folder, table):
            framework = row["framework"] or "megatron-core"
            if framework in known and missing_fields(row) is None and step_s(row) == step_s(row):
                try:
                    yield (
                        _trained(row),
                        LABELS.get(table, DEFAULT_LABEL).source
                        or row["source"].split("@")[0].split(" ")[0],
                    )
                except HpToolError:  # a setting that no query can describe
                    continue


def _trained(row: Row) -> Setting:
    query = training_query(row)
    assert query.training is not None
    card = gpu(row["gpu"].replace("h100-sxm-96gb", "h100-sxm-80gb"))
    model = resolve_model(query.model)
    return training_setting(
        model=dataclasses.replace(model, name=row["model"]),
        gpu=dataclasses.replace(card, name=row["gpu"]),
        workload=query.training,
        num_gpus=row["num_gpus"],
    )


def _servings(folder: Path) -> Iterator[tuple[Setting, str]]:
    """Yield the settings and the source of each serving run: runs of releases that have constants,
    and runs of MoE models.
    """
    dense = dense_runs(folder)
    cached = cached_series(dense)
    known = {(each.engine, each.version) for each in engine_profiles() if not each.kernels_alone}
    chosen = [run for run in dense if (run.engine, run.version) in known]
    for run in (*chosen, *moe_runs(folder)):
        if run.series not in cached:
            yield setting_of(run), f"{run.engine} {run.version}"


def _grouped(found: Iterable[tuple[Setting, str]]) -> list[Measured]:
    counts: Counter[tuple[Setting, str]] = Counter()
    most: dict[tuple[Setting, str], int] = {}
    for setting, source in found:
        key = dataclasses.replace(setting, num_gpus=1), source
        counts[key] += 1
        most[key] = max(most.get(key, 1), setting.num_gpus)
    runs = [
        Measured(
            **{each.name: getattr(setting, each.name) for each in dataclasses.fields(Setting)}
            | {"num_gpus": most[setting, source], "n": n, "source": source}
        )
        for (setting, source), n in counts.items()
    ]
    return sorted(runs, key=lambda run: [str(getattr(run, name)) for name in COLUMNS[1:]])


def as_csv(found: Iterable[Group]) -> str:
    """Return the groups in the format of the catalog file."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(COLUMNS)
    for kind, run in found:
        writer.writerow([kind, *(getattr(run, name) for name in COLUMNS[1:])])
    return stream.getvalue()


@dataclass(frozen=True, kw_only=True)
class IndexFile:
    """The index as one file of the catalog, with the methods of `FittedFile`."""

    text: str
    file: str = FILE.name
    fields: Any = dataclasses.field(default_factory=dict)

    def write(self) -> None:
        """Write the file."""
        FILE.write_text(self.text, encoding="utf-8")

    def differences(self) -> Iterator[str]:
        """Yield a line for each group that is missing in the file and for each group that only the
        file has.
        """
        stored = FILE.read_text(encoding="utf-8").splitlines() if FILE.is_file() else []
        fitted = self.text.splitlines()
        for line in stored:
            if line not in fitted:
                yield f"{self.file}: stored, not measured: {line}"
        for line in fitted:
            if line not in stored:
                yield f"{self.file}: measured, not stored: {line}"


def fitted(folder: Path) -> Iterator[IndexFile]:
    """Yield the index."""
    yield IndexFile(text=as_csv(groups(folder)))

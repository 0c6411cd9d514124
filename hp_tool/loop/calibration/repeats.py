"""Repeated runs of one configuration: a few of them represent all."""

import numpy as np

from hp_tool.loop.assumptions import assumed
from hp_tool.loop.calibration.evidence import Evidence, IntArray


def limit_repeats(evidence: Evidence, *, repeats: int | None = None) -> Evidence:
    """Return the evidence with at most `repeats` runs per configuration and outcome.

    The default is `Repeats.fitted_runs`. The selected runs are at evenly spaced quantiles of the
    configuration's step times: k of n runs at (i + 1/2) / k. This preserves the median, the spread
    and the fraction of stalls. The order of the rows does not matter.
    """
    most = assumed().repeats.fitted_runs if repeats is None else repeats
    kept = [
        _quantiles(evidence, rows, most) for rows in group_by_configuration(evidence, outcome=True)
    ]
    if sum(map(len, kept)) == len(evidence):
        return evidence
    return evidence.take(np.sort(np.concatenate(kept)))


def group_by_configuration(evidence: Evidence, *, outcome: bool = False) -> list[IntArray]:
    """Return the rows of each configuration, in order of first occurrence.

    Rows belong to the same configuration if the predictions of all their parts are equal. With
    `outcome`, runs out of memory are separate groups.
    """
    columns = [evidence.layer_passes, *evidence.parts_s.values(), *evidence.features.values()]
    if outcome:
        columns += [evidence.memory_bytes, evidence.out_of_memory.astype(np.float64)]
    rows: dict[tuple[float, ...], list[int]] = {}
    for row, key in enumerate(zip(*(column.tolist() for column in columns), strict=True)):
        rows.setdefault(tuple(map(float, key)), []).append(row)
    return [np.array(each, dtype=np.intp) for each in rows.values()]


def _quantiles(evidence: Evidence, rows: IntArray, repeats: int) -> IntArray:
    if len(rows) <= repeats:
        return rows
    ids = np.array(evidence.measurement_ids)[rows]
    ordered = rows[
        np.lexsort((ids, evidence.measured_memory_bytes[rows], evidence.measured_step_s[rows]))
    ]
    places = ((np.arange(repeats) + 0.5) * len(rows) / repeats).astype(np.intp)
    return np.asarray(ordered[places])

"""The fewest devices on which something fits and meets the targets.

More replicas of one shape share the load, so what a shape does on n devices it does on every larger number that it fills. Let
m(n) be the largest legal number up to n that a shape fills: whether any shape passes on its m(n) never turns from true to false
as n grows, and where it first turns true is the answer. Halving finds it.
"""

from dataclasses import fields, replace

import numpy as np

from hp_tool import bounds
from hp_tool.cost.arrays import BoolArray, IntArray
from hp_tool.cost.serving.candidates import ServingCandidates
from hp_tool.domain.query import Query
from hp_tool.serving.highest import bears, costed_rows
from hp_tool.serving.problem import ServingProblem
from hp_tool.space.serving import serving_space

CHUNK = 12_288
"""Candidates costed at once."""


def fewest_devices(*, query: Query, problem: ServingProblem) -> ServingProblem:
    """Return the problem on the fewest of the cluster's legal numbers of devices with an acceptable configuration; as it is
    where none has one."""
    counts = np.array(problem.cluster.legal_counts())
    shapes, sizes = _shapes(query, problem, counts)
    low, high = -1, len(counts) - 1
    passing = _passes(problem, shapes, sizes, counts)
    while passing.any() and high - low > 1:
        shapes, sizes = shapes.take(np.flatnonzero(passing)), sizes[passing]
        passing = np.ones(len(sizes), dtype=bool)
        middle = (low + high) // 2
        on_fewer = _passes(problem, shapes, sizes, counts[: middle + 1])
        if on_fewer.any():
            high, passing = middle, on_fewer
        else:
            low = middle
    return problem if high == len(counts) - 1 else problem.with_num_gpus(int(counts[high]))


def _shapes(query: Query, problem: ServingProblem, counts: IntArray) -> tuple[ServingCandidates, IntArray]:
    """Return every shape of a replica that is legal on one of `counts`, once, and its devices; shape (n,)."""
    rows = []
    for count in counts.tolist():
        bounds.check()
        case = problem.with_num_gpus(count)
        candidates, _ = serving_space(query=query.parallel, case=case, concurrency=(problem.concurrency or 1,))
        one = replace(candidates, data_parallel_size=candidates.attention_data_parallel_size)
        rows.append(np.stack([getattr(one, field.name) for field in fields(one)], axis=1))
    columns = np.unique(np.concatenate(rows), axis=0).T
    shapes = ServingCandidates(**{field.name: column for field, column in zip(fields(ServingCandidates), columns, strict=True)})
    return shapes, shapes.devices


def _passes(problem: ServingProblem, shapes: ServingCandidates, sizes: IntArray, counts: IntArray) -> BoolArray:
    """Return whether each shape is acceptable on the largest of the rising `counts` that it fills; shape (n,)."""
    devices = np.zeros_like(sizes)
    for count in counts.tolist():
        devices[count % sizes == 0] = count
    passing = np.zeros(len(sizes), dtype=bool)
    filled = np.flatnonzero(devices)
    for first in range(0, len(filled), CHUNK):
        rows = filled[first : first + CHUNK]
        bounds.check(done=len(rows))
        one = shapes.take(rows)
        ranks = one.tensor_parallel_size * one.pipeline_parallel_size
        costed, _ = costed_rows(problem, replace(one, data_parallel_size=devices[rows] // ranks))
        passing[rows] = bears(costed)
    return passing

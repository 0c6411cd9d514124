"""Find the smallest number of devices that meets the targets, or the number that is cheapest per
token.

Smallest: replicas share the load, so a replica shape that meets the targets on n devices also does
so on any larger number that it fills. Let m(n) be the largest legal number up to n that a shape
fills. The condition "some shape meets the targets on its m(n) devices" stays true as n grows, so
bisection finds the smallest n.

Cheapest: for a given number of requests in flight, every shape is costed on every number of devices
that it fills. For a given request rate, any number of devices completes the same tokens, so the
smallest number is the cheapest.
"""

from dataclasses import fields, replace

import numpy as np

from hp_tool.cost.arrays import BoolArray, IntArray
from hp_tool.cost.serving.candidates import ServingCandidates
from hp_tool.domain import bounds
from hp_tool.domain.query import Query
from hp_tool.questions.serving.highest_load import cost_rows, sustains_load
from hp_tool.questions.serving.problem import CostedRows, ServingProblem
from hp_tool.questions.serving.ranked import CHUNK
from hp_tool.space.serving import serving_space

RELATIVE_TOLERANCE = 1e-9
"""Relative difference of throughputs that rounding can cause."""


def fewest_devices(*, query: Query, problem: ServingProblem) -> ServingProblem:
    """Return the problem on the fewest devices on which a configuration is acceptable. If there are
    none, return the problem unchanged.
    """
    counts = np.array(problem.cluster.legal_counts())
    shapes, sizes = _replica_shapes(query, problem, counts)
    low, high = -1, len(counts) - 1
    passing = _is_acceptable(problem, shapes, sizes, counts)
    while passing.any() and high - low > 1:
        shapes, sizes = shapes.take(np.flatnonzero(passing)), sizes[passing]
        passing = np.ones(len(sizes), dtype=bool)
        middle = (low + high) // 2
        on_fewer = _is_acceptable(problem, shapes, sizes, counts[: middle + 1])
        if on_fewer.any():
            high, passing = middle, on_fewer
        else:
            low = middle
    return problem.with_num_gpus(int(counts[high]))


def cheapest_devices(*, query: Query, problem: ServingProblem) -> ServingProblem:
    """Return the problem on the number of devices that gives the most tokens per second per device.

    Of equally good numbers, the largest is chosen. If the query leaves the load open, the problem
    keeps all devices, because the load grows with them.
    """
    if problem.unknown is not None:
        return problem
    if problem.request_rate_per_second is not None:
        return fewest_devices(query=query, problem=problem)
    counts = np.array(problem.cluster.legal_counts())
    shapes, sizes = _replica_shapes(query, problem, counts)
    shape, count = np.nonzero(counts % sizes[:, None] == 0)
    devices, tokens = counts[count], np.zeros(len(shape))
    for first in range(0, len(shape), CHUNK):
        rows = slice(first, first + CHUNK)
        bounds.check_work(done=len(shape[rows]))
        costed = _cost_shapes(problem, shapes.take(shape[rows]), devices[rows])
        tokens[rows] = np.where(
            sustains_load(costed), costed.costs.output_tokens_per_second_per_gpu, 0.0
        )
    best = tokens.max(initial=0.0)
    if best == 0.0:
        return problem
    most = int(devices[tokens >= best * (1.0 - RELATIVE_TOLERANCE)].max())
    return problem.with_num_gpus(most)


def _cost_shapes(
    problem: ServingProblem, shapes: ServingCandidates, devices: IntArray
) -> CostedRows:
    """Return the costs of each shape with as many replicas as fill its number of devices."""
    ranks = shapes.tensor_parallel_size * shapes.pipeline_parallel_size
    return cost_rows(problem, replace(shapes, data_parallel_size=devices // ranks))[0]


def _replica_shapes(
    query: Query, problem: ServingProblem, counts: IntArray
) -> tuple[ServingCandidates, IntArray]:
    """Return the distinct replica shapes that are legal on at least one of the `counts` of devices,
    shape (n,), and the number of devices of each.
    """
    rows = []
    for count in counts.tolist():
        bounds.check_work()
        case = problem.with_num_gpus(count)
        candidates, _ = serving_space(
            query=query.parallel, case=case, concurrency=(problem.concurrency or 1,)
        )
        one = replace(candidates, data_parallel_size=candidates.attention_data_parallel_size)
        rows.append(np.stack([getattr(one, field.name) for field in fields(one)], axis=1))
    columns = np.unique(np.concatenate(rows), axis=0).T
    shapes = ServingCandidates(
        **{
            field.name: column
            for field, column in zip(fields(ServingCandidates), columns, strict=True)
        }
    )
    return shapes, shapes.devices


def _is_acceptable(
    problem: ServingProblem, shapes: ServingCandidates, sizes: IntArray, counts: IntArray
) -> BoolArray:
    """Return whether each shape is acceptable on the largest of `counts` that it fills. `counts`
    are ascending.
    """
    devices = np.zeros_like(sizes)
    for count in counts.tolist():
        devices[count % sizes == 0] = count
    passing = np.zeros(len(sizes), dtype=bool)
    filled = np.flatnonzero(devices)
    for first in range(0, len(filled), CHUNK):
        rows = filled[first : first + CHUNK]
        bounds.check_work(done=len(rows))
        passing[rows] = sustains_load(_cost_shapes(problem, shapes.take(rows), devices[rows]))
    return passing

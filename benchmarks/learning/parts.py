"""`python -m benchmarks.learning.parts`: what one trace teaches of a cluster whose network is half
as fast as stated.

Simulated truths: 20 cases of a model and devices; the truth is the cost model's with half the
bandwidth between nodes, each part off by 3 % and each layout by 1 %. One run of one layout is
known, by its step time alone or also by its parts; five other layouts of the same work are
predicted. Printed: mean |ln(predicted / true)| of the five, in percent.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from hp_tool.cost.candidates import Candidates
from hp_tool.loop.calibration import (
    Evidence,
    fit_calibration,
    layer_passes,
    prior_for,
    residual_features,
)
from hp_tool.loop.calibration.evidence import FloatArray
from hp_tool.loop.learning.links import fitted_links
from hp_tool.questions import schema, training
from hp_tool.questions.training.links import Links, with_links
from hp_tool.questions.training.problem import TrainingProblem, resolve_training

MODELS = ("llama-2-7b", "llama-3-8b", "llama-2-13b", "llama-3-70b", "mixtral-8x7b")
GPUS = ("h100-sxm-80gb", "a100-sxm-80gb")
CASES, OTHERS = 20, 5
PART_SD, LAYOUT_SD = 0.03, 0.01
SLOWED = 1.05
"""Times that a layout's step takes longer with half the network, at least: others tell nothing of
it.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Mean errors of five layouts, as fractions."""

    what: str
    before: float
    """By the cost model as stated."""
    by_step: float
    """With one run's step time."""
    by_parts: float
    """With its parts."""
    network: float
    """The bandwidth that they say, over the stated one; half is true."""


def problem_of(chance: np.random.Generator) -> tuple[TrainingProblem, Candidates]:
    """A question, and the layouts of it that a network half as fast slows."""
    while True:
        gpus = int(chance.choice([16, 32, 64, 128]))
        query = schema.parse_query(
            {
                "kind": "training",
                "model": str(chance.choice(MODELS)),
                "cluster": {"gpu": str(chance.choice(GPUS)), "num_gpus": gpus},
                "training": {
                    "sequence_length": 4096,
                    "global_batch_size": int(gpus * chance.choice([2, 4, 8])),
                },
            }
        )
        rows = training.recommend(query=query, top=200).recommendations
        problem = resolve_training(query)
        if len(rows) < 2 * OTHERS:
            continue
        layouts = Candidates.from_configs([row.parallel for row in rows])
        slowed = slower(problem).costs(layouts).step_s / problem.costs(layouts).step_s > SLOWED
        if slowed.sum() > OTHERS:
            return problem, layouts.take(np.flatnonzero(slowed))


def slower(problem: TrainingProblem) -> TrainingProblem:
    """The question on a network of half the bandwidth."""
    cluster = problem.cluster
    half = cluster.inter_node_bandwidth_bytes_per_second / 2.0
    return replace(problem, cluster=replace(cluster, inter_node_bandwidth_bytes_per_second=half))


def evidence(
    problem: TrainingProblem, layouts: Candidates, *, parts_s: dict[str, FloatArray]
) -> Evidence:
    """Runs of the layouts, whose parts took `parts_s`."""
    costs = problem.costs(layouts)
    rows = len(layouts)
    return Evidence(
        measurement_ids=tuple(map(str, range(rows))),
        parts_s={name: np.broadcast_to(seconds, rows) for name, seconds in costs.parts.items()},
        layer_passes=layer_passes(case=problem, candidates=layouts),
        memory_bytes=np.ones(rows),
        capacity_bytes=np.full(rows, 2.0),
        measured_step_s=np.asarray(sum(parts_s.values())),
        measured_memory_bytes=np.full(rows, np.nan),
        out_of_memory=np.zeros(rows, dtype=np.bool_),
        features=residual_features(case=problem, candidates=layouts),
        measured_parts_s=parts_s,
    )


def case(seed: int) -> Case:
    """One case."""
    chance = np.random.default_rng(seed)
    problem, layouts = problem_of(chance)
    rows = chance.permutation(len(layouts))[: OTHERS + 1]
    layouts = layouts.take(rows)
    true = slower(problem).costs(layouts).parts
    own = np.exp(LAYOUT_SD * chance.standard_normal(OTHERS + 1))
    true_s = {
        name: own
        * np.broadcast_to(seconds, OTHERS + 1)
        * np.exp(PART_SD * chance.standard_normal(OTHERS + 1))
        for name, seconds in true.items()
    }
    one = layouts.take(np.array([0]))
    links = fitted_links([(problem, one, {name: seconds[:1] for name, seconds in true_s.items()})])

    def error(links: Links, *, run: bool, parts: bool) -> float:
        runs = evidence(with_links(problem, links), layouts, parts_s=true_s)
        first, others = runs.take(np.array([0])), runs.take(np.arange(1, OTHERS + 1))
        known = (first if parts else replace(first, measured_parts_s={})) if run else None
        fit = fit_calibration(evidence=known, prior=prior_for(kind="gpu")).step_time
        step = fit.predict(
            parts_s=others.parts_s, layer_passes=others.layer_passes, features=others.features
        )
        return float(np.abs(np.log(step.median_s / others.measured_step_s)).mean())

    what = f"{problem.model.name} on {problem.cluster.num_gpus} x {problem.cluster.gpu.name}"
    return Case(
        what=what,
        before=error(Links(), run=False, parts=False),
        by_step=error(Links(), run=True, parts=False),
        by_parts=error(links, run=True, parts=True),
        network=links.network,
    )


def main() -> None:
    """Print the cases and their means."""
    cases = [case(seed) for seed in range(CASES)]
    print(f"{'case':45} {'before':>8} {'step':>8} {'parts':>8} {'network':>8}")
    for each in cases:
        print(
            f"{each.what:45} {each.before:8.1%} {each.by_step:8.1%} {each.by_parts:8.1%} "
            f"{each.network:8.2f}"
        )
    before, by_step, by_parts = (
        float(np.mean([getattr(each, name) for each in cases]))
        for name in ("before", "by_step", "by_parts")
    )
    print(f"{'mean':45} {before:8.1%} {by_step:8.1%} {by_parts:8.1%}")
    halved = sum(each.by_parts <= 0.5 * each.by_step for each in cases)
    print(
        f"parts leave {by_parts / by_step:.2f} of the error that one step time leaves; at most "
        f"half in {halved} cases"
    )


if __name__ == "__main__":
    main()

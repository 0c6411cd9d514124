"""`python -m benchmarks.learning.parts`: how much better the parts of one traced run predict other
layouts than its step time alone.

Simulated machines differ from the cost model in one way each (`TRUTHS`). In addition, each part is
off by 3% and each layout by 1%. A calibration learns from one run of one layout, by its step time
alone or also by its parts, and predicts five other layouts of the same training. The table shows
the mean of |ln(predicted / true)| over the five, and what remains if the machine is known exactly.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

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
CASES, OTHERS = 12, 5
"""Cases per machine; layouts that each case predicts."""
PART_SD, LAYOUT_SD = 0.03, 0.01
SLOWED = 1.05
"""Least true / predicted step time of a layout; other layouts do not show the difference."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Truth:
    """How a machine differs from the cost model."""

    name: str
    links: Links = field(default_factory=Links)
    factors: dict[str, float] = field(default_factory=dict)
    """True / predicted seconds by part; 1 for all others."""

    def parts_s(self, problem: TrainingProblem, layouts: Candidates) -> dict[str, FloatArray]:
        """Return the true seconds of n layouts by part, each (n,)."""
        parts = with_links(problem, self.links).costs(layouts).parts
        return {
            name: np.broadcast_to(self.factors.get(name, 1.0) * seconds, len(layouts))
            for name, seconds in parts.items()
        }


TRUTHS = (
    Truth(name="network x1/2", links=Links(network=0.5)),
    Truth(name="NVLink x1/2", links=Links(nvlink=0.5)),
    Truth(name="attention x2", factors={"attention": 2.0}),
    Truth(name="optimizer x3", factors={"optimizer": 3.0}),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """Mean errors of five layouts, as fractions."""

    before: float
    """Error of the cost model without any run."""
    by_step: float
    """Error after learning one run's step time."""
    by_parts: float
    """Error after learning that run's step time and parts."""
    least: float
    """Error of a cost model that knows the machine exactly."""


def problem_of(chance: np.random.Generator, truth: Truth) -> tuple[TrainingProblem, Candidates]:
    """Draw a training and return its layouts that the truth slows."""
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
        true_s = sum(truth.parts_s(problem, layouts).values())
        slowed = true_s / problem.costs(layouts).step_s > SLOWED
        if slowed.sum() > OTHERS:
            return problem, layouts.take(np.flatnonzero(slowed))


def evidence(
    problem: TrainingProblem, layouts: Candidates, *, parts_s: dict[str, FloatArray]
) -> Evidence:
    """Return runs of the layouts whose parts took `parts_s`."""
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


def measure_errors(truth: Truth, seed: int) -> Errors:
    """Draw one case and return its errors."""
    chance = np.random.default_rng(seed)
    problem, layouts = problem_of(chance, truth)
    layouts = layouts.take(chance.permutation(len(layouts))[: OTHERS + 1])
    expected_s = truth.parts_s(problem, layouts)
    layout_factor = np.exp(LAYOUT_SD * chance.standard_normal(OTHERS + 1))
    true_s = {
        name: layout_factor * seconds * np.exp(PART_SD * chance.standard_normal(OTHERS + 1))
        for name, seconds in expected_s.items()
    }
    first = layouts.take(np.array([0]))
    links = fitted_links([(problem, first, {name: s[:1] for name, s in true_s.items()})])

    def error(links: Links, *, run: bool, parts: bool) -> float:
        runs = evidence(with_links(problem, links), layouts, parts_s=true_s)
        first, others = runs.take(np.array([0])), runs.take(np.arange(1, OTHERS + 1))
        known = (first if parts else replace(first, measured_parts_s={})) if run else None
        fit = fit_calibration(evidence=known, prior=prior_for(kind="gpu")).step_time
        step = fit.predict(
            parts_s=others.parts_s, layer_passes=others.layer_passes, features=others.features
        )
        return float(np.abs(np.log(step.median_s / others.measured_step_s)).mean())

    least = np.log(sum(expected_s.values()) / sum(true_s.values()))[1:]
    return Errors(
        before=error(Links(), run=False, parts=False),
        by_step=error(Links(), run=True, parts=False),
        by_parts=error(links, run=True, parts=True),
        least=float(np.abs(least).mean()),
    )


def main() -> None:
    """Print the mean errors for each machine."""
    print(f"{'machine':16}{'before':>9}{'step':>9}{'parts':>9}{'least':>9}   parts / step")
    for truth in TRUTHS:
        cases = [measure_errors(truth, seed) for seed in range(CASES)]
        before, by_step, by_parts, least = (
            float(np.mean([getattr(each, name) for each in cases])) for name in Errors.__slots__
        )
        print(
            f"{truth.name:16}{before:9.1%}{by_step:9.1%}{by_parts:9.1%}{least:9.1%}"
            f"   {by_parts / by_step:.2f} (at least {least / by_step:.2f})"
        )


if __name__ == "__main__":
    main()

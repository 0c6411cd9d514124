"""Trainings by constants that saw nothing of their family, kind of model, precision or scale."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from pathlib import Path

from benchmarks.accuracy.comparison import Comparison
from benchmarks.accuracy.fit_frameworks import fit_2022, fit_today, today_runs
from benchmarks.accuracy.groups import TODAY, Group
from benchmarks.accuracy.prepared import Prepared, compare_all
from benchmarks.accuracy.runs import newest, pretraining
from evidence.cases import Case
from hp_tool.domain.familiarity import arithmetic, family_of

FEW_GPUS = 512
"""Constants of fewer GPUs predict more, up to 11,616."""


def unfamiliar(folder: Path) -> list[Group]:
    """Return dense pre-training and mixtures, each by constants without runs of its kind."""
    if not today_runs(folder):
        return []
    cases = pretraining(folder)
    dense = [case for case in cases if not case.has_experts and case.card == "h100-sxm-80gb"]
    mixtures = newest(case for case in cases if case.has_experts)
    families = sorted({family(case) for case in dense})
    precisions = ("bf16", "fp8")
    known = [run.case for run in today_runs(folder)]
    h100 = [case for case in known if not case.has_experts and case.card == "h100-sxm-80gb"]
    return [
        Group(
            title="Dense pre-training, a family left out",
            left_out="model",
            saw=f"{TODAY}, without the family",
            rows=[
                row
                for name in families
                for row in without(folder, dense, functools.partial(_is, family, name))
            ],
        ),
        Group(
            title="Mixtures of experts by dense models",
            left_out="model",
            saw=f"{TODAY}, without experts",
            rows=without(folder, mixtures, lambda case: case.has_experts),
        ),
        Group(
            title="Dense pre-training in a precision left out",
            left_out="setting",
            saw=f"{TODAY}, without the precision",
            rows=[
                row
                for name in precisions
                for row in without(folder, h100, functools.partial(_is, precision, name))
            ],
        ),
        Group(
            title="Dense pre-training on more GPUs than seen",
            left_out="setting",
            saw=f"{TODAY}, on at most {FEW_GPUS} GPUs",
            rows=without(folder, dense, lambda case: gpus(case) > FEW_GPUS),
        ),
    ]


def without(
    folder: Path, cases: Iterable[Case], is_left_out: Callable[[Case], bool]
) -> list[Comparison]:
    """Return the cases that are left out, by constants fitted on the others."""
    seen = tuple(run for run in today_runs(folder) if not is_left_out(run.case))
    constants = fit_today(seen, fit_2022(folder))
    return compare_all((case for case in cases if is_left_out(case)), constants.compare)


def _is(name: Callable[[Case], str], value: str, case: Case) -> bool:
    return name(case) == value


def family(case: Case) -> str:
    return family_of(case.name)


def precision(case: Case) -> str:
    assert case.query.training is not None
    return arithmetic(case.query.training.precision)


def gpus(case: Case) -> int:
    return Prepared.of(case).problem.cluster.num_gpus

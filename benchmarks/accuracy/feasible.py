"""Real runs that the model calls infeasible, by source; the nanotron grid counts its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain
from pathlib import Path
from typing import Any

from benchmarks.accuracy import heldout, moe_runs
from benchmarks.accuracy.fsdp_runs import mpt_cases, titan_cases
from benchmarks.accuracy.internevo_runs import internevo_cases, memory_cases

SOURCES: dict[str, Callable[[Path], Iterable[heldout.Run]]] = {
    "Megatron-LM 2020": heldout.megatron_2020,
    "NVIDIA's dense recipes": heldout.megatron_bridge,
    "NVIDIA's mixture-of-experts recipes": lambda folder: (case.run() for case in moe_runs.moe_cases(folder)),
    "models cut to fit 8 B200": heldout.b200,
    "MPT under FSDP": lambda folder: (case.run() for case in mpt_cases(folder)),
    "InternEvo": lambda folder: (case.run() for case in (*internevo_cases(folder), *memory_cases(folder))),
    "torchtitan": lambda folder: (case.run() for case in titan_cases(folder)[0]),
}


def evaluate(folder: Path) -> dict[str, Any]:
    """{sources: {name: {ran, refused}}, ran, refused: a sentence each}. None of these sources publishes recomputation
    but the first and FSDP's: a recipe that fits without counts as one that runs.
    """
    found = {name: list(source(folder)) for name, source in SOURCES.items()}
    return {
        "sources": {
            name: {"ran": len(runs), "refused": sum(not run.estimate.feasible for run in runs)} for name, runs in found.items()
        },
        "ran": sum(map(len, found.values())),
        "refused": [
            f"{run.name} {run.what}: {run.estimate.reasons[0].message}"
            for run in chain.from_iterable(found.values())
            if not run.estimate.feasible
        ],
    }


def as_text(found: dict[str, Any]) -> str:
    """The count, by source, and every refused run with its reason."""
    lines = [f"Published runs called infeasible: {len(found['refused'])} of {found['ran']}"]
    lines += [f"{counts['refused']:3} of {counts['ran']:3}  {name}" for name, counts in found["sources"].items()]
    return "\n  ".join([*lines, *found["refused"]])

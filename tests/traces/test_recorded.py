"""Traces made here: gloo trainings of the built-in profiler under torch.profiler, with planted
faults and without.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from hp_tool.traces import read_traces
from hp_tool.traces.timeline import Timeline, faults, timeline
from tests.conftest import skip_or_fail

ROOT = Path(__file__).parents[2]
JOBS = {
    # Faults of their own job change the process, or need four of them.
    2: [["dp:host_gap", "wide:exposed_communication", "pp:unequal_work"], ["dp:slow_rank"]],
    4: [["tpdp:slow_link"]],
}
CULPRITS = {"dp:host_gap": 1, "dp:slow_rank": 1, "pp:unequal_work": 0}
CLEAN = {
    2: [f"{layout}:clean{run}" for run in range(3) for layout in ("dp", "pp")],
    4: [f"tpdp:clean{run}" for run in range(4)],
}


def record(folder: Path, *, processes: int, cases: list[str]) -> dict[str, Timeline]:
    """Run the cases in one job and read what they recorded."""
    if not (importlib.util.find_spec("torch") and importlib.util.find_spec("megatron")):
        skip_or_fail(
            component="MEGATRON",
            reason="torch and megatron-core (the profiler extra) are not installed",
        )
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={processes}",
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [*torchrun, "tests/traces/recorded.py", str(folder), *cases]
    subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True, timeout=900)
    lines = {}
    for case in cases:
        line = timeline(read_traces(sorted(folder.glob(f"{case.replace(':', '_')}.rank*.json"))))
        assert len(line.ranks) == processes and line.marked
        for steps, spans in zip(line.splits, line.windows_s, strict=True):
            assert [step.step_s for step in steps] == pytest.approx(
                list(np.diff(spans)[:, 0]), rel=0.01
            )
        lines[case] = line
    return lines


@pytest.mark.long
@pytest.mark.components
@pytest.mark.parametrize(
    ("processes", "cases"), [(count, cases) for count, jobs in JOBS.items() for cases in jobs]
)
def test_a_fault_planted_in_a_training_is_named_first(
    tmp_path: Path, processes: int, cases: list[str]
) -> None:
    for case, line in record(tmp_path, processes=processes, cases=cases).items():
        first = faults(line)[0]
        assert (first.kind, first.rank) == (case.partition(":")[2], CULPRITS.get(case)), case
        if case == "tpdp:slow_link":
            assert (first.part, first.ranks) == ("tensor_parallel", (2, 3))


@pytest.mark.long
@pytest.mark.components
@pytest.mark.parametrize("processes", CLEAN)
def test_nothing_is_named_in_trainings_without_a_fault(tmp_path: Path, processes: int) -> None:
    """Ten in all."""
    named = {
        case: faults(line)
        for case, line in record(tmp_path, processes=processes, cases=CLEAN[processes]).items()
        if faults(line)
    }
    assert named == {}

"""Many requests in one job: imports and rendezvous are paid once."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from hp_tool.cluster.launchers import create
from hp_tool.domain.jobs import LaunchPlan
from hp_tool.domain.measurement import Measurement, ProfileRequest
from hp_tool.domain.states import JobState
from tests.conftest import skip_or_fail
from tests.launchers.contract import wait
from tests.profiler.requests import request

HANG_S = 1200.0
"""A minute and a half on an idle machine, many on one that others use."""


def run_together(
    root: Path, *, processes: int, cases: dict[str, dict[str, Any]]
) -> dict[str, Measurement]:
    """As one job of the local launcher, which leaves no rank behind should one hang."""
    if not (importlib.util.find_spec("torch") and importlib.util.find_spec("megatron")):
        skip_or_fail(
            component="MEGATRON",
            reason="torch and megatron-core (the profiler extra) are not installed",
        )
    asked = {name: request(**changes) for name, changes in cases.items()}
    assert {each.num_gpus for each in asked.values()} == {processes}
    script = Path(__file__).with_name("ranks.py")
    torchrun = (
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={processes}",
    )
    plan = LaunchPlan(
        job_name="ranks",
        command=(*torchrun, str(script), "."),
        environment={"PYTHONPATH": str(script.parents[2]), "OMP_NUM_THREADS": "1"},
        files={
            f"{name}.request.json": TypeAdapter(ProfileRequest).dump_json(each).decode()
            for name, each in asked.items()
        },
        num_gpus=processes,
        timeout_s=HANG_S,
    )
    launcher = create("local", root=root, cpu_only=True)
    wait(launcher, launcher.submit(plan), until={JobState.FINISHED}, limit_s=2 * HANG_S)
    results = {
        path.name.split(".")[0]: path.read_bytes()
        for path in (root / "ranks").glob("*.result.json")
    }
    assert results.keys() == cases.keys(), (root / "ranks" / "job.log").read_text()[-6000:]
    return {name: TypeAdapter(Measurement).validate_json(text) for name, text in results.items()}

"""A real training of three processes under gloo, of which one becomes slow: told as that rank, by
what each reports.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.command_line import ROOT, hp_tool
from tests.torch_or_skip import torch_or_skip

TRAINING = textwrap.dedent("""
    import os, sys, time, torch
    import torch.distributed as dist
    from hp_tool.reporter import Reporter

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, steps, slow_from, slow_rank = dist.get_rank(), *map(int, sys.argv[1:])
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    reporter = Reporter()
    reporter.step()
    for step in range(steps):
        with reporter.part("compute"):
            loss = model(torch.randn(32, 64)).square().mean()
            loss.backward()
            # A device of a steady pace: the two cores under these processes have none.
            time.sleep(0.15 if rank == slow_rank and step >= slow_from else 0.03)
        with reporter.part("communication"):
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()
        optimizer.step()
        optimizer.zero_grad()
        reporter.step(step=step)
    dist.destroy_process_group()
""")


@pytest.mark.components
def test_one_slow_rank_of_a_real_training_is_named(tmp_path: Path) -> None:
    torch_or_skip()
    script, logs = tmp_path / "train.py", tmp_path / "steps"
    script.write_text(TRAINING)
    logs.mkdir()
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "HP_WATCH_FILE": str(logs / "rank{rank}.jsonl"),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "3",
    ]
    ended = subprocess.run(
        [*launch, str(script), "300", "200", "1"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    watched = hp_tool("watch", str(logs))
    assert watched.returncode == 4, watched.stdout + watched.stderr
    assert "rank 1 of 3: compute time" in watched.stdout

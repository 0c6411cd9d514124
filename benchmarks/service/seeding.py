"""Write a search with very many trials directly into the tables, instead of running it.

Configurations and predictions are the cost model's for a 70B model on 1,024 H100. The
"measurements" scatter around the predictions and some fail, so that lists and charts have content.
They are not results of any GPU.
"""

from __future__ import annotations

import random
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
import sqlalchemy as sa

from hp_tool.domain.digests import configuration_digest
from hp_tool.domain.measurement import Fidelity, Measurement
from hp_tool.domain.parallel import ParallelConfig
from hp_tool.questions.schema import parse_query, to_dict
from hp_tool.questions.training.problem import resolve_training
from hp_tool.questions.training.ranking.rank import cost_space
from hp_tool.store import tables
from hp_tool.store.columns import new_id
from hp_tool.store.engine import create_engine

QUERY: dict[str, Any] = {
    "kind": "training",
    "model": "llama-2-70b",
    "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": 1024, "gpus_per_node": 8},
    "training": {"sequence_length": 4096, "global_batch_size": 1024},
    "parallel": {
        "recompute": [
            "none",
            "selective",
            *({"granularity": "full", "method": "block", "num_layers": n} for n in range(1, 9)),
        ]
    },
}
CAUSES = {
    "oom": "rank 3 ran out of memory",
    "crashed": "rank 1 failed",
    "timeout": "not done after 300 s",
}
OUTCOMES = ("ok",) * 17 + tuple(CAUSES)
LOG = "".join(f"[rank{rank}] iteration {rank}: loss 10.{rank:02}\n" for rank in range(40))


def seed_search(*, url: str, trials: int, seed: int = 0) -> str:
    """Store a running search with this number of ended trials; return its id."""
    query = parse_query(QUERY | {"search": {"budget_runs": trials + 1}})
    space = cost_space(problem=resolve_training(query))
    order = np.lexsort((space.step_s, ~space.acceptable))[:trials]
    if len(order) < trials:
        raise ValueError(f"the space has {len(order)} candidates")
    dice, search_id, now = random.Random(seed), new_id(), datetime.now(UTC)
    dice.shuffle(order := order.tolist())
    runs, measurements = [], []
    for number, row in enumerate(order):
        at = now - timedelta(seconds=60 * (trials - number))
        parallel = space.candidates.config(row)
        step_s, memory = float(space.step_s[row]), float(space.memory_total_bytes[row])
        run = _run(search_id, number, parallel, step_s=step_s, memory=memory, at=at)
        runs.append(run)
        measurement = _outcome(dice, step_s=step_s, memory=memory, fits=bool(space.acceptable[row]))
        measurements.append(_stored(run, measurement, at=at))
    best = min((m for m in measurements if m["status"] == "ok"), key=lambda each: each["step_s"])
    search = {
        "id": search_id,
        "state": "running",
        "query": to_dict(query),
        "priority": 0,
        "lease_holder": "seeded",
        "lease_token": 1,
        "lease_expires_at": now + timedelta(hours=1),
        "heartbeat_at": now,
        "last_event": 0,
        "created_at": now - timedelta(seconds=60 * trials),
        "updated_at": now,
        "started_at": now - timedelta(seconds=60 * trials),
        "progress": {
            "profile_runs": trials,
            "budget_runs": trials + 1,
            "gpu_seconds": sum(run["gpu_seconds"] for run in runs),
            "best_run_id": best["run_id"],
            "best_step_s": best["step_s"],
            "best_parallel": best["parallel"],
        },
    }
    engine = create_engine(url)
    with engine.begin() as connection:
        connection.execute(sa.insert(tables.searches), [search])
        connection.execute(sa.insert(tables.runs), runs)
        connection.execute(sa.insert(tables.measurements), measurements)
    engine.dispose()
    return search_id


def _run(
    search_id: str,
    number: int,
    parallel: ParallelConfig,
    *,
    step_s: float,
    memory: float,
    at: datetime,
) -> dict[str, Any]:
    return {
        "id": new_id(),
        "search_id": search_id,
        "number": number,
        "digest": configuration_digest(parallel=parallel, fidelity=Fidelity()),
        "attempt": 0,
        "state": "finished",
        "parallel": to_dict(parallel),
        "fidelity": to_dict(Fidelity()),
        "predicted": {
            "step_s": step_s,
            "calibrated_step_s": 1.08 * step_s,
            "calibrated_step_s_interval": [step_s, 1.17 * step_s],
            "memory_allocated_bytes": memory,
            "chosen_by": "best_expected",
        },
        "job_name": f"hp-{search_id}-r{number}-t1",
        "token": 1,
        "gpu_seconds": 1024 * 30.0,
        "created_at": at,
        "submitted_at": at,
        "finished_at": at + timedelta(seconds=50),
    }


def _outcome(dice: random.Random, *, step_s: float, memory: float, fits: bool) -> Measurement:
    status = dice.choice(OUTCOMES) if fits else "oom"
    if status != "ok":
        return Measurement(status=status, cause=CAUSES[status], log_tail=LOG)
    seen = step_s * dice.lognormvariate(0.09, 0.05)
    return Measurement(
        status="ok",
        step_s=seen,
        step_times_s=(seen,) * 5,
        tokens_per_second_per_gpu=4096 * 1024 / 1024 / seen,
        peak_memory_bytes=int(memory * dice.uniform(0.93, 1.02)),
    )


def _stored(run: dict[str, Any], measurement: Measurement, *, at: datetime) -> dict[str, Any]:
    return {
        "id": new_id(),
        "source": "profile",
        "search_id": run["search_id"],
        "run_id": run["id"],
        "cluster_key": "h100-sxm-80gb",
        "gpu": "h100-sxm-80gb",
        "framework": "megatron-core",
        "model": "llama-2-70b",
        "query": QUERY,
        "parallel": run["parallel"],
        "problem_digest": "0" * 64,
        "digest": run["digest"],
        "status": measurement.status,
        "step_s": measurement.step_s,
        "tokens_per_second_per_gpu": measurement.tokens_per_second_per_gpu,
        "peak_memory_bytes": measurement.peak_memory_bytes,
        "measurement": to_dict(measurement),
        "predicted": run["predicted"],
        "trust": 1.0,
        "state": "accepted",
        "created_at": at,
    }

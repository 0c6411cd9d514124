"""Check that a trace matches the query before its step is used to correct predictions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from hp_tool.cost.flops import flops_tolerance, step_tokens, token_flops
from hp_tool.domain.device_names import matches_gpu
from hp_tool.domain.parallel import ParallelConfig
from hp_tool.questions.training.problem import TrainingProblem
from hp_tool.traces.timeline import Timeline
from hp_tool.traces.timeline.workload import has_backward, has_optimizer, workload_of

FULL_RECOMPUTE = 4.0 / 3.0
"""Upper bound of the ratio of FLOPs with full recomputation to FLOPs without (arXiv 2205.05198,
section 5).
"""
CheckName = Literal["device", "ranks", "matmul_flops", "backward", "optimizer"]
CheckState = Literal["matches", "unknown", "differs"]
Teaching = Literal["applied", "held", "refused"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One comparison of a trace with its query."""

    name: CheckName
    state: CheckState
    text: str
    """Description of the comparison, with both values."""


def run_checks(
    line: Timeline, *, problem: TrainingProblem, config: ParallelConfig, sizes: Mapping[str, Any]
) -> tuple[Check, ...]:
    """Compare a trace with the query's device, ranks and FLOPs.

    Check that it has backward passes and an optimizer step.

    Args:
        line: The recorded steps.
        problem: The resolved query.
        config: The query's configuration.
        sizes: Parallel group sizes recorded in the trace, by query path.
    """
    backward, optimizer = has_backward(line.ranks), has_optimizer(line.ranks)
    work = workload_of(line.ranks)
    return (
        _device(line, problem),
        _ranks(line, problem, config, sizes),
        _flops(line, problem, config),
        Check(
            name="backward",
            state="matches" if backward else "differs",
            text="a backward pass was recorded"
            if backward
            else f"no backward pass was recorded ({work})",
        ),
        Check(
            name="optimizer",
            state="matches" if optimizer else "differs",
            text="an optimizer step was recorded"
            if optimizer
            else (
                "no optimizer step was recorded; record complete steps (forward, backward, "
                "optimizer)"
            ),
        ),
    )


def measurement_use(trace_checks: Sequence[Check]) -> Teaching:
    """Return how the step may be used: refused if any check differs, held if one is unknown."""
    states = {check.state for check in trace_checks}
    return "refused" if "differs" in states else "held" if "unknown" in states else "applied"


def refusal_reasons(trace_checks: Sequence[Check]) -> str:
    """Return why the step is refused or held. Empty if all checks match."""
    worst = "differs" if any(check.state == "differs" for check in trace_checks) else "unknown"
    return "; ".join(check.text for check in trace_checks if check.state == worst)


def _device(line: Timeline, problem: TrainingProblem) -> Check:
    gpu, rank = problem.cluster.gpu, line.ranks[line.critical]
    if rank.on_device == (gpu.kind == "cpu"):
        what = "a GPU" if rank.on_device else "a CPU process"
        return Check(
            name="device", state="differs", text=f"the trace is of {what}, the query of {gpu.name}"
        )
    if gpu.kind == "cpu":
        return Check(name="device", state="matches", text="the trace and the query are of a CPU")
    if not rank.device:
        return Check(name="device", state="unknown", text="the trace does not name its device")
    states: dict[bool | None, CheckState] = {True: "matches", False: "differs", None: "unknown"}
    same = matches_gpu(rank.device, gpu=gpu.name)
    return Check(
        name="device",
        state=states[same],
        text=f"the trace is of {rank.device}, the query of {gpu.name}",
    )


def _ranks(
    line: Timeline, problem: TrainingProblem, config: ParallelConfig, sizes: Mapping[str, Any]
) -> Check:
    devices, recorded = problem.cluster.num_gpus, len(line.ranks)
    world = max(rank.world_size for rank in line.ranks)
    for path, size in sizes.items():
        stated = getattr(config, path.removeprefix("parallel."), None)
        if stated is not None and stated != size:
            return Check(
                name="ranks",
                state="differs",
                text=f"the trace has {path} {size}, the query {stated}",
            )
    if (world and world != devices) or recorded > devices:
        return Check(
            name="ranks",
            state="differs",
            text=f"the trace is of {max(world, recorded)} ranks, the query of {devices}",
        )
    if world or recorded == devices:
        return Check(
            name="ranks", state="matches", text=f"the trace and the query are of {devices} ranks"
        )
    text = f"the trace does not record its world size, and {recorded} of {devices} ranks were given"
    return Check(name="ranks", state="unknown", text=text)


def _flops(line: Timeline, problem: TrainingProblem, config: ParallelConfig) -> Check:
    recorded = [flops for flops in _recorded_flops(line) if flops > 0.0]
    if not recorded:
        text = "the trace has no matmul shapes; record with record_shapes=True to check the model"
        return Check(name="matmul_flops", state="unknown", text=text)
    token = token_flops(problem.model, problem.workload)
    tokens = step_tokens(problem.workload) / problem.cluster.num_gpus
    # In unfused attention, computing scores and outputs also uses matmuls with recorded shapes.
    recomputed = FULL_RECOMPUTE if _recomputes_layers(config) else 1.0
    lowest = tokens * (3.0 * (token.layers + token.logits) - token.frozen)
    highest = tokens * recomputed * (3.0 * token.forward - token.frozen)
    tolerance = flops_tolerance(config)
    mean = float(np.mean(recorded))
    text = f"recorded matmuls are {mean:.3g} FLOPs per rank and step, the query's {lowest:.3g}"
    if mean > tolerance * highest:
        return Check(name="matmul_flops", state="differs", text=text)
    if mean < lowest / tolerance:
        text += ": another model or batch, or matmuls in kernels without recorded shapes"
        return Check(name="matmul_flops", state="unknown", text=text)
    return Check(name="matmul_flops", state="matches", text=text)


def _recomputes_layers(config: ParallelConfig) -> bool:
    """Return True if matmuls of layers are recomputed, for whole layers or selected operators."""
    recompute = config.recompute
    name = recompute if isinstance(recompute, str) else recompute.granularity
    return name in ("full", "per_layer", "per_op") or (
        not isinstance(recompute, str) and bool(recompute.modules)
    )


def _recorded_flops(line: Timeline) -> Iterator[float]:
    for events, spans in zip(line.ranks, line.windows_s, strict=True):
        called = (events.flops[:, 0] >= spans[0, 0]) & (events.flops[:, 0] < spans[-1, 1])
        yield float(events.flops[called, 1].sum()) / len(spans)

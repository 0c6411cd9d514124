"""Real optimizer steps of the plain-torch engine, timed one by one."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from typing import Any

import torch
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.nn import functional

from hp_tool.domain.measurement import ProfileRequest
from hp_tool.profiler import breakdown, stopping
from hp_tool.profiler.clock import slowest, synchronize
from hp_tool.profiler.native.model import Decoder
from hp_tool.profiler.native.parallel import build_stages, make_mesh
from hp_tool.profiler.samples import sample
from hp_tool.profiler.steps import Steps

_LEARNING_RATE = 1e-4


def train(request: ProfileRequest, *, device: torch.device) -> Steps:
    """Build, then run warm-up and measured steps, fewer where `stopping` finds them enough.

    Raises ArithmeticError where the loss is not finite.
    """
    mesh = make_mesh(request, device=device)
    stages = build_stages(request, mesh, device=device)
    parameters = [parameter for _, stage in stages for parameter in stage.parameters()]
    optimizers = {"adam": lambda: torch.optim.AdamW(parameters, lr=_LEARNING_RATE, foreach=True)}
    optimizers["sgd"] = lambda: torch.optim.SGD(parameters, lr=_LEARNING_RATE, momentum=0.9, foreach=True)
    optimizer = optimizers[request.training.optimizer]()
    step = _Pipeline(request, mesh, stages, device=device) if mesh["pp"].size() > 1 else _Plain(request, stages[0][1])
    rows = _rows(request, mesh, device=device)

    def whole_step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = step(rows)
        _clip(parameters, mesh, norm=1.0)
        optimizer.step()
        return loss

    times: list[float] = []
    losses: list[float] = []
    stopped = None
    for _ in range(request.warmup_steps + request.steps):
        distributed.barrier()
        synchronize(device)
        started = time.perf_counter()
        loss = whole_step()
        synchronize(device)
        times.append(slowest(time.perf_counter() - started, device=device))
        losses.append(_mean(loss, device=device))
        if distributed.get_rank() == 0:
            print(f"step {len(times)}: {times[-1]:.4f} s, loss {losses[-1]:.4f}", flush=True)
        stopped = stopping.why_stop(request, times)
        if stopped is not None:
            break
    if not all(map(math.isfinite, losses)):
        raise ArithmeticError(f"the loss is not finite: {losses}")
    parts = breakdown.of_one_step(whole_step, device=device) if request.breakdown else None
    return Steps(times_s=tuple(times), losses=tuple(losses), stopped=stopped, breakdown_s=parts)


class _Plain:
    """Micro-batches one after another; each one's gradients are reduced at once, so that they stay sharded."""

    def __init__(self, request: ProfileRequest, model: Decoder) -> None:
        self.size, self.model = request.parallel.micro_batch_size, model

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        pieces = rows.split(self.size)
        total = torch.zeros((), device=rows.device)
        for piece in pieces:
            loss = _loss(self.model(piece[:, :-1]), piece[:, 1:]) / len(pieces)
            loss.backward()
            total += loss.detach()
        return total


class _Pipeline:
    """torch's own schedules over this rank's stages; the loss is known on the last stage's ranks alone."""

    def __init__(
        self, request: ProfileRequest, mesh: DeviceMesh, stages: list[tuple[int, Decoder]], *, device: torch.device
    ) -> None:
        parallel = request.parallel
        group, p = mesh["pp"].get_group(), parallel.pipeline_parallel_size
        total = p * parallel.virtual_pipeline_parallel_size
        made = [PipelineStage(model, number, total, device, group=group) for number, model in stages]
        count = request.training.global_batch_size // (parallel.data_parallel_size * parallel.micro_batch_size)
        options: dict[str, Any] = {"n_microbatches": count, "loss_fn": _loss}
        interleaved = len(made) > 1
        self.schedule: Any = ScheduleInterleaved1F1B(made, **options) if interleaved else Schedule1F1B(made[0], **options)
        self.first, self.last = stages[0][0] == 0, stages[-1][0] == total - 1

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        losses: list[torch.Tensor] = []
        given = {"target": rows[:, 1:].contiguous(), "losses": losses} if self.last else {}
        self.schedule.step(*([rows[:, :-1].contiguous()] if self.first else []), **given)
        return torch.stack(losses).mean().detach() if self.last else torch.full((), math.nan)


@torch.no_grad()
def _clip(parameters: list[torch.nn.Parameter], mesh: DeviceMesh, *, norm: float) -> None:
    """Scale all gradients so that their common norm is at most `norm`. Those of different meshes have no common operation."""
    by_mesh: dict[Any, list[torch.Tensor]] = defaultdict(list)
    for parameter in parameters:
        if parameter.grad is not None:
            by_mesh[parameter.grad.device_mesh].append(parameter.grad)
    squares = [torch.nn.utils.get_total_norm(gradients).full_tensor() ** 2 for gradients in by_mesh.values()]
    square = torch.stack(squares).sum()
    if mesh["pp"].size() > 1:
        distributed.all_reduce(square, group=mesh["pp"].get_group())
    factor = torch.clamp(norm / (square.sqrt() + 1e-6), max=1.0)
    for gradients in by_mesh.values():
        torch._foreach_mul_(gradients, factor)


def _loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def _rows(request: ProfileRequest, mesh: DeviceMesh, *, device: torch.device) -> torch.Tensor:
    """[B / d, s + 1] tokens of this data-parallel rank; each row depends on the seed and its number alone."""
    d = request.parallel.data_parallel_size
    rank = mesh["replicate"].get_local_rank() * mesh["shard"].size() + mesh["shard"].get_local_rank()
    mine = range(rank, request.training.global_batch_size, d)
    return torch.stack([sample(request, number) for number in mine]).to(device)


def _mean(loss: torch.Tensor, *, device: torch.device) -> float:
    """Over the ranks that know a loss."""
    known = bool(torch.isfinite(loss)) or not bool(torch.isnan(loss))
    sums = torch.tensor([float(loss) if known else 0.0, float(known)], dtype=torch.float64, device=device)
    distributed.all_reduce(sums)
    return float(sums[0] / sums[1])

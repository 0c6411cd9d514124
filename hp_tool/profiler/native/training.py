"""Real optimizer steps of the plain-torch engine."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.nn import functional

from hp_tool.domain.measurement import ProfileRequest
from hp_tool.profiler import steps
from hp_tool.profiler.native.model import Decoder
from hp_tool.profiler.native.parallel import build_stages, make_mesh

_LEARNING_RATE = 1e-4


def train(request: ProfileRequest, *, device: torch.device) -> steps.Steps:
    """Build the model and run the steps. Raises ArithmeticError if a loss is not finite."""
    mesh = make_mesh(request, device=device)
    stages = build_stages(request, mesh, device=device)
    parameters = [parameter for _, stage in stages for parameter in stage.parameters()]
    optimizers = {"adam": lambda: torch.optim.AdamW(parameters, lr=_LEARNING_RATE, foreach=True)}
    optimizers["sgd"] = lambda: torch.optim.SGD(parameters, lr=_LEARNING_RATE, momentum=0.9, foreach=True)
    optimizer = optimizers[request.training.optimizer]()
    loss_of = _Pipeline(request, mesh, stages, device=device) if mesh["pp"].size() > 1 else _Plain(request, stages[0][1])
    rows = _rows(request, mesh, device=device)

    def step() -> tuple[torch.Tensor | None, float]:
        optimizer.zero_grad()
        loss = loss_of(rows)
        norm = _clip(parameters, mesh, max_norm=1.0)
        optimizer.step()
        return loss, norm

    return steps.run(request, step, device=device)


class _Plain:
    """Micro-batches one after another; gradients are reduced after each one, so that they stay sharded."""

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
    """torch's own schedules over this rank's stages; only the ranks of the last stage know the loss."""

    def __init__(
        self, request: ProfileRequest, mesh: DeviceMesh, stages: list[tuple[int, Decoder]], *, device: torch.device
    ) -> None:
        parallel = request.parallel
        group, p = mesh["pp"].get_group(), parallel.pipeline_parallel_size
        total = p * parallel.virtual_pipeline_parallel_size
        made = [PipelineStage(model, number, total, device, group=group) for number, model in stages]
        count = request.training.global_batch_size // (parallel.data_parallel_size * parallel.micro_batch_size)
        self.schedule: Any
        if len(made) > 1:
            self.schedule = ScheduleInterleaved1F1B(made, n_microbatches=count, loss_fn=_loss)
        else:
            self.schedule = Schedule1F1B(made[0], n_microbatches=count, loss_fn=_loss)
        self.first, self.last = stages[0][0] == 0, stages[-1][0] == total - 1

    def __call__(self, rows: torch.Tensor) -> torch.Tensor | None:
        losses: list[torch.Tensor] = []
        targets = {"target": rows[:, 1:].contiguous(), "losses": losses} if self.last else {}
        self.schedule.step(*([rows[:, :-1].contiguous()] if self.first else []), **targets)
        return torch.stack(losses).mean().detach() if self.last else None


@torch.no_grad()
def _clip(parameters: list[torch.nn.Parameter], mesh: DeviceMesh, *, max_norm: float) -> float:
    """Scale all gradients so that their norm is at most `max_norm`, and return it. Operations cannot mix different meshes."""
    by_mesh: dict[Any, list[torch.Tensor]] = defaultdict(list)
    for parameter in parameters:
        if parameter.grad is not None:
            by_mesh[parameter.grad.device_mesh].append(parameter.grad)
    squares = [torch.nn.utils.get_total_norm(gradients).full_tensor() ** 2 for gradients in by_mesh.values()]
    square = torch.stack(squares).sum()
    if mesh["pp"].size() > 1:
        distributed.all_reduce(square, group=mesh["pp"].get_group())
    norm = square.sqrt()
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for gradients in by_mesh.values():
        torch._foreach_mul_(gradients, factor)
    return float(norm)


def _loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def _rows(request: ProfileRequest, mesh: DeviceMesh, *, device: torch.device) -> torch.Tensor:
    """[B / d, s + 1] tokens of this data-parallel rank; a row depends only on the seed and its number."""
    d = request.parallel.data_parallel_size
    rank = mesh["replicate"].get_local_rank() * mesh["shard"].size() + mesh["shard"].get_local_rank()
    mine = range(rank, request.training.global_batch_size, d)
    return torch.stack([steps.sample(request, number) for number in mine]).to(device)

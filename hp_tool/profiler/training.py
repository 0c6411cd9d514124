"""Real optimizer steps over the built model, timed one by one."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_model_config
from torch import distributed

from hp_tool.domain.measurement import ProfileRequest
from hp_tool.profiler import breakdown, data, stopping
from hp_tool.profiler.clock import slowest, synchronize
from hp_tool.profiler.steps import Steps

_LEARNING_RATE = 1e-4
_LOSS_SCALE = 2.0**12  # low enough that no fp16 step overflows: a skipped step would be timed without its optimizer


def train(request: ProfileRequest, chunks: list[DistributedDataParallel], *, device: torch.device) -> Steps:
    """Run warm-up and measured steps, fewer where `stopping` finds them enough.

    Raises ArithmeticError where the loss is not finite or fp16 skipped a step.
    """
    optimizer = _optimizer(request, chunks)
    config = get_model_config(chunks[0])
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    schedule = get_forward_backward_func()
    batches = data.micro_batches(request, device=device)
    times: list[float] = []
    losses: list[torch.Tensor] = []
    stopped = None
    for step in range(request.warmup_steps + request.steps):
        distributed.barrier()
        synchronize(device)
        started = time.perf_counter()
        loss, norm = _step(request, chunks, optimizer, schedule, batches)
        synchronize(device)
        times.append(slowest(time.perf_counter() - started, device=device))
        losses.append(loss)
        if _is_narrator():
            print(f"step {step + 1}: {times[-1]:.4f} s, loss {float(loss):.4f}, gradient norm {norm:.4f}", flush=True)
        stopped = stopping.why_stop(request, times)
        if stopped is not None:
            break
    return Steps(
        times_s=tuple(times),
        losses=_mean_losses(losses, device=device),
        stopped=stopped,
        breakdown_s=breakdown.of_one_step(lambda: _step(request, chunks, optimizer, schedule, batches), device=device)
        if request.breakdown
        else None,
    )


def _optimizer(request: ProfileRequest, chunks: list[DistributedDataParallel]) -> MegatronOptimizer:
    precision = request.training.precision
    config = OptimizerConfig(
        optimizer=request.training.optimizer,
        lr=_LEARNING_RATE,
        bf16=precision in ("bf16", "fp8"),
        fp16=precision == "fp16",
        params_dtype=get_model_config(chunks[0]).params_dtype,
        initial_loss_scale=_LOSS_SCALE,
        use_distributed_optimizer=request.parallel.zero_stage == 1,
        clip_grad=1.0,
    )
    return get_megatron_optimizer(config, chunks, use_gloo_process_groups=False)


def _step(
    request: ProfileRequest,
    chunks: list[DistributedDataParallel],
    optimizer: MegatronOptimizer,
    schedule: Any,
    batches: list[data.MicroBatch],
) -> tuple[torch.Tensor, float]:
    """One optimizer step under Megatron's schedule -> (sum of this rank's micro-batch losses / their number, gradient norm)."""
    for chunk in chunks:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
    iterators = data.iterators(batches)
    interleaved = len(chunks) > 1
    results = schedule(
        forward_step_func=_forward,
        data_iterator=iterators if interleaved else iterators[0],
        model=chunks if interleaved else chunks[0],
        num_microbatches=len(batches),
        seq_length=request.training.sequence_length,
        micro_batch_size=request.parallel.micro_batch_size,
        forward_only=False,
    )
    updated, norm, _zeros = optimizer.step()
    if not updated:
        raise ArithmeticError("fp16 gradients overflowed and the optimizer skipped a step")
    loss = torch.stack([result["loss"] for result in results]).mean() if results else torch.zeros(())
    return loss, float(norm)


def _forward(batches: Iterator[data.MicroBatch], chunk: torch.nn.Module) -> tuple[torch.Tensor, Any]:
    """Megatron's forward_step_func: one micro-batch through one chunk."""
    batch = next(batches)
    output = chunk(batch.tokens, batch.position_ids, attention_mask=None, labels=batch.labels)
    return output, _loss


def _loss(token_losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = token_losses.float().mean()
    # The schedule multiplies by the context-parallel size what it expects to be this rank's share of the whole row's mean; it
    # changes the loss in place.
    return loss / parallel_state.get_context_parallel_world_size(), {"loss": loss.detach().clone()}


def _is_narrator() -> bool:
    """The one rank whose steps go into the log: it must know the loss."""
    last = parallel_state.is_pipeline_last_stage(ignore_virtual=True)
    return (
        last
        and parallel_state.get_tensor_model_parallel_rank() == 0
        and parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0
    )


def _mean_losses(losses: list[torch.Tensor], *, device: torch.device) -> tuple[float, ...]:
    """Mean over the ranks, step by step; only the last stages know losses, so the others count as nothing."""
    last = float(parallel_state.is_pipeline_last_stage(ignore_virtual=True))
    sums = torch.tensor([*(float(loss) * last for loss in losses), last], dtype=torch.float64, device=device)
    distributed.all_reduce(sums)
    means = tuple((sums[:-1] / sums[-1]).tolist())
    if not all(map(math.isfinite, means)):
        raise ArithmeticError(f"the loss is not finite: {means}")
    return means

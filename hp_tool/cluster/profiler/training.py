"""Run optimizer steps of the Megatron model on a global batch that is the same for every layout."""

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.full_cuda_graph import FullCudaGraphWrapper
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_model_config

from hp_tool.cluster.profiler import steps
from hp_tool.domain.measurement import GRAPHS_AFTER, ProfileRequest

_LEARNING_RATE = 1e-4
_MOMENTS = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.uint8,
}
# Low enough that no fp16 step overflows. A skipped step would be timed without its optimizer.
_LOSS_SCALE = 2.0**12


MicroBatch: TypeAlias = dict[str, torch.Tensor]
"""tokens, labels and position_ids; each has shape [micro_batch_size, sequence_length /
context_parallel_size].
"""


def train(
    request: ProfileRequest, chunks: list[DistributedDataParallel], *, device: torch.device
) -> steps.Steps:
    """Run the steps. Raise ArithmeticError if a loss is not finite or fp16 skips a step."""
    optimizer = _optimizer(request, chunks)
    config = get_model_config(chunks[0])
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    batches = _micro_batches(request, device=device)
    schedule = get_forward_backward_func()
    # The first step runs normally, the second is captured in a CUDA graph, and later steps replay
    # it.
    if config.cuda_graph_impl != "none":
        schedule = FullCudaGraphWrapper(schedule, cuda_graph_warmup_steps=GRAPHS_AFTER - 1)
    return steps.run(
        request, lambda: _step(request, chunks, optimizer, batches, schedule), device=device
    )


def _optimizer(request: ProfileRequest, chunks: list[DistributedDataParallel]) -> MegatronOptimizer:
    precision = request.training.precision
    first = request.training.optimizer_precision or "fp32"
    second = request.training.exp_avg_sq_precision or first
    config = OptimizerConfig(
        use_precision_aware_optimizer=(first, second) != ("fp32", "fp32"),
        exp_avg_dtype=_MOMENTS[first],
        exp_avg_sq_dtype=_MOMENTS[second],
        overlap_param_gather=chunks[0].ddp_config.overlap_param_gather,
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
    batches: list[MicroBatch],
    schedule: Callable[..., list[dict[str, torch.Tensor]]],
) -> tuple[torch.Tensor | None, float]:
    for chunk in chunks:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
    interleaved = len(chunks) > 1  # every micro-batch passes through each chunk of this rank
    results = schedule(
        forward_step_func=_forward,
        data_iterator=[iter(batches) for _ in chunks] if interleaved else iter(batches),
        model=chunks if interleaved else chunks[0],
        num_microbatches=len(batches),
        seq_length=request.training.sequence_length,
        micro_batch_size=request.parallel.micro_batch_size,
        forward_only=False,
    )
    updated, norm, _zeros = optimizer.step()
    if not updated:
        raise ArithmeticError("fp16 gradients overflowed, so the optimizer skipped a step")
    last = parallel_state.is_pipeline_last_stage(ignore_virtual=True)
    return torch.stack([result["loss"] for result in results]).mean() if last else None, float(norm)


def _forward(
    batches: Iterator[MicroBatch], chunk: torch.nn.Module, return_schedule_plan: bool = False
) -> tuple[torch.Tensor, Any]:
    batch = next(batches)
    forward = chunk.build_schedule_plan if return_schedule_plan else chunk
    return forward(
        batch["tokens"], batch["position_ids"], attention_mask=None, labels=batch["labels"]
    ), _loss


def _loss(token_losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = token_losses.float().mean()
    # The schedule multiplies the loss by the context-parallel size in place, because it expects
    # this rank's share of the sequence mean.
    return loss / parallel_state.get_context_parallel_world_size(), {"loss": loss.detach().clone()}


def _micro_batches(request: ProfileRequest, *, device: torch.device) -> list[MicroBatch]:
    size, rank = request.parallel.micro_batch_size, parallel_state.get_data_parallel_rank()
    count = request.training.global_batch_size // (request.parallel.data_parallel_size * size)
    places = _positions(request.training.sequence_length).to(device)
    positions = places.expand(size, len(places))
    batches = []
    for step in range(count):
        first = (step * request.parallel.data_parallel_size + rank) * size
        samples = torch.stack(
            [steps.sample(request, number) for number in range(first, first + size)]
        ).to(device)
        batches.append(
            {
                "tokens": samples[:, places],
                "labels": samples[:, places + 1],
                "position_ids": positions,
            }
        )
    return batches


def _positions(sequence: int) -> torch.Tensor:
    """Return the sequence positions that this context-parallel rank processes.

    The sequence is split into 2c chunks for c ranks. Rank r processes chunk r from the start and
    chunk r from the end, which balances causal attention.
    """
    size, rank = (
        parallel_state.get_context_parallel_world_size(),
        parallel_state.get_context_parallel_rank(),
    )
    if size == 1:
        return torch.arange(sequence)
    pieces = torch.arange(sequence).chunk(2 * size)
    return torch.cat([pieces[rank], pieces[-1 - rank]])

"""Run one replica on a repeated batch: prefill, then greedy decoding with a KV cache."""

import statistics
from dataclasses import dataclass

import torch
from megatron.core.inference.contexts import StaticInferenceContext
from torch import distributed

from hp_tool.cluster.profiler import model
from hp_tool.cluster.profiler.backend import max_over_ranks, now
from hp_tool.domain.measurement import ProfileRequest, ServingTimes
from hp_tool.domain.parallel import ParallelConfig
from hp_tool.domain.requests import InferenceRequest
from hp_tool.domain.workload import TrainingWorkload


@dataclass(frozen=True, slots=True)
class GenerationTimes:
    """Times of one repetition, on the slowest rank."""

    ttft_s: float
    """Time to first token in seconds, mean over the prompts. Prompts in one forward pass finish
    together.
    """
    tpot_s: float
    seconds: float
    tokens: torch.Tensor
    """Generated tokens, shape [concurrency, output_length]."""


def serve(request: InferenceRequest, *, device: torch.device) -> ServingTimes:
    """Return the latencies of the request's batch, which are equal on all ranks.

    All ranks must call it.
    """
    gpt = build(request, device=device)
    prompts = make_prompts(request, device=device)
    answers = [
        generate(request, gpt, prompts, device=device)
        for _ in range(request.warmup + request.repetitions)
    ]
    measured = answers[request.warmup :]
    ttft, tpot = tuple(each.ttft_s for each in measured), tuple(each.tpot_s for each in measured)
    rate = measured[0].tokens.numel() / statistics.median(each.seconds for each in measured)
    return ServingTimes.from_repetitions(
        ttft_s=ttft, tpot_s=tpot, output_tokens_per_second=rate, runner="megatron-core"
    )


def build(request: InferenceRequest, *, device: torch.device) -> torch.nn.Module:
    """Build this rank's shard of the model. The process group must exist."""
    chunk = model.build_chunks(_as_training(request), device=device)[0]
    return chunk.eval()


def make_prompts(request: InferenceRequest, *, device: torch.device) -> torch.Tensor:
    """Return random prompts that are the same on every rank, shape [concurrency, input_length]."""
    generator = torch.Generator().manual_seed(request.seed)
    shape = (request.inference.concurrency or 1, request.inference.input_length)
    return torch.randint(request.model.vocab_size, shape, generator=generator).to(device)


@torch.inference_mode()
def generate(
    request: InferenceRequest, gpt: torch.nn.Module, prompts: torch.Tensor, *, device: torch.device
) -> GenerationTimes:
    """Prefill in groups of at most max_num_batched_tokens, then decode all prompts together."""
    batch, length = prompts.shape
    context = StaticInferenceContext(batch, length + request.inference.output_length)
    group = max(1, request.parallel.max_num_batched_tokens // length)
    distributed.barrier()
    started = now(device)
    first, waited = [], 0.0
    for start in range(0, batch, group):
        context.batch_size_offset = start
        first.append(_next_tokens(gpt, prompts[start : start + group], context, position=0))
        waited += len(first[-1]) * (now(device) - started)
    tokens = [torch.cat(first)]
    prefilled = now(device)
    context.batch_size_offset = 0
    context.enable_decode_mode()
    for step in range(request.inference.output_length - 1):
        context.sequence_len_offset = length + step
        tokens.append(_next_tokens(gpt, tokens[-1], context, position=length + step))
    ended = now(device)
    steps = max(1, request.inference.output_length - 1)
    return GenerationTimes(
        ttft_s=max_over_ranks(waited / batch, device=device),
        tpot_s=max_over_ranks((ended - prefilled) / steps, device=device)
        if request.inference.output_length > 1
        else 0.0,
        seconds=max_over_ranks(ended - started, device=device),
        tokens=torch.cat(tokens, dim=1),
    )


def _next_tokens(
    gpt: torch.nn.Module, tokens: torch.Tensor, context: StaticInferenceContext, *, position: int
) -> torch.Tensor:
    """Map [n, k] tokens from `position` on to the most likely next tokens, shape [n, 1]."""
    positions = torch.arange(position, position + tokens.shape[1], device=tokens.device).expand_as(
        tokens
    )
    logits = gpt(
        tokens,
        positions,
        attention_mask=None,
        inference_context=context,
        runtime_gather_output=True,
    )
    return logits[:, -1:].argmax(-1)


def _as_training(request: InferenceRequest) -> ProfileRequest:
    load = request.inference
    return ProfileRequest(
        run_id=request.run_id,
        model=request.model,
        training=TrainingWorkload(
            sequence_length=load.input_length + load.output_length,
            global_batch_size=load.concurrency or 1,
            precision=load.precision,  # type: ignore[arg-type]  # support.check_serving only allows 16 and 32 bits
        ),
        parallel=ParallelConfig(tensor_parallel_size=request.parallel.tensor_parallel_size),
        num_gpus=request.num_gpus,
        gpu=request.gpu,
        steps=1,
        warmup_steps=0,
        timeout_s=request.timeout_s,
        seed=request.seed,
    )

"""Synthetic tokens: one global batch, the same at every step and under every division, so that training lowers its loss."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from megatron.core import parallel_state

from hp_tool.domain.measurement import ProfileRequest
from hp_tool.profiler.samples import sample


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Tensors of shape [micro_batch_size, sequence_length / context_parallel_size]."""

    tokens: torch.Tensor
    labels: torch.Tensor
    position_ids: torch.Tensor


def num_micro_batches(request: ProfileRequest) -> int:
    """Micro-batches a pipeline runs per step: B / (d b)."""
    parallel = request.parallel
    return request.training.global_batch_size // (parallel.data_parallel_size * parallel.micro_batch_size)


def micro_batches(request: ProfileRequest, *, device: torch.device) -> list[MicroBatch]:
    """One step's micro-batches of this data-parallel rank; each sample depends on the seed and its number alone."""
    size, rank = request.parallel.micro_batch_size, parallel_state.get_data_parallel_rank()
    sequence = request.training.sequence_length
    places = _places(sequence).to(device)
    positions = places.expand(size, len(places))
    batches = []
    for step in range(num_micro_batches(request)):
        first = (step * request.parallel.data_parallel_size + rank) * size
        samples = torch.stack([sample(request, number) for number in range(first, first + size)]).to(device)
        batches.append(MicroBatch(tokens=samples[:, places], labels=samples[:, places + 1], position_ids=positions))
    return batches


def iterators(batches: list[MicroBatch]) -> list[Iterator[MicroBatch]]:
    """An iterator per model chunk: interleaving passes every micro-batch through each chunk of this rank."""
    chunks = parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1
    return [iter(batches) for _ in range(chunks)]


def _places(sequence: int) -> torch.Tensor:
    """The places of a sequence that this context-parallel rank holds: of 2c equal pieces the r-th and, so that causal attention
    is as much work everywhere, the r-th from the end.
    """
    size, rank = parallel_state.get_context_parallel_world_size(), parallel_state.get_context_parallel_rank()
    if size == 1:
        return torch.arange(sequence)
    pieces = torch.arange(sequence).chunk(2 * size)
    return torch.cat([pieces[rank], pieces[-1 - rank]])

"""Synthetic rows of tokens."""

from __future__ import annotations

import torch

from hp_tool.domain.measurement import ProfileRequest


def sample(request: ProfileRequest, number: int) -> torch.Tensor:
    """[sequence_length + 1] tokens that depend on the seed and the row's number alone."""
    generator = torch.Generator().manual_seed(request.seed * 1_000_003 + number)
    return torch.randint(request.model.vocab_size, (request.training.sequence_length + 1,), generator=generator)

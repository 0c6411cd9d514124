"""Run Megatron Core, which hard-codes CUDA, on a CPU. Call `install()` before importing megatron.

Nothing is emulated. CUDA devices become the CPU, streams and synchronization do nothing, and the
CPU's random generator replaces CUDA's, so Megatron's RNG tracker and checkpointing run unchanged.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable
from typing import Any

import torch

_CPU = torch.device("cpu")


@functools.cache
def install() -> None:
    """Patch torch, once per process."""
    # On a CPU, compiling small fused kernels takes longer than a profile run, and importing the
    # compiler alone takes two seconds.
    torch.compile = _no_compile
    torch.cuda.current_device = lambda: _CPU
    torch.cuda.synchronize = torch.cuda.empty_cache = lambda *_, **__: None
    torch.cuda.manual_seed = torch.manual_seed
    torch.cuda.get_rng_state = lambda *_, **__: torch.get_rng_state()
    torch.cuda.Stream = torch.cuda.Event = _Stream
    torch.cuda.current_stream = torch.cuda.default_stream = lambda *_, **__: _Stream()
    torch.cuda.stream = lambda *_, **__: contextlib.nullcontext()
    torch.Tensor.cuda = lambda self, *_, **__: self
    torch.Tensor.type = _cuda_type_names(torch.Tensor.type)
    for factory in ("empty", "full", "ones", "tensor", "zeros"):
        setattr(torch, factory, _on_cpu(getattr(torch, factory)))

    from megatron.core.tensor_parallel import random

    random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    from megatron.core.transformer.moe import token_dispatcher

    token_dispatcher.maybe_move_tensor_to_cpu = _split_sizes
    # It warns at each use that the CPU's generator is affected, which is intended here.
    logging.getLogger(random.__name__).setLevel(logging.ERROR)


class _Stream:
    """A stream or event that does nothing, for a device without streams."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def wait_stream(self, _: object) -> None: ...

    def wait_event(self, _: object) -> None: ...

    def record_event(self, _: object = None) -> _Stream:
        return self

    def synchronize(self) -> None: ...


def _split_sizes(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Return an all-to-all's token counts. The original function does so only for GPU tensors."""
    return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor


def _no_compile(function: Callable[..., Any] | None = None, **_: object) -> Callable[..., Any]:
    return function if function is not None else lambda wrapped: wrapped


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def create(
        *args: Any, device: Any = None, pin_memory: bool = False, **kwargs: Any
    ) -> torch.Tensor:
        return factory(*args, device=_CPU if device == "cuda" else device, **kwargs)

    return create


def _cuda_type_names(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap Tensor.type() to return torch.cuda type names.

    The optimizer groups parameters by these names.
    """

    @functools.wraps(original)
    def type_of(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = original(self, *args, **kwargs)
        return answer.replace("torch.", "torch.cuda.", 1) if isinstance(answer, str) else answer

    return type_of

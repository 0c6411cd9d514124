"""Time the parts of a small training step: kernels by kind, gaps between kernels, and the gain of a
CUDA graph.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.kernels.llama import Adam, Llama, MainGradients, step_1f1b
from benchmarks.kernels.timing import median_ms

KINDS = (
    ("attention", ("flash", "fmha", "attention", "sdpa", "cudnn_generated")),
    ("matmul", ("gemm", "cutlass", "xmma", "nvjet", "splitk", "cublas")),
    ("optimizer", ("adam", "multi_tensor")),
    ("copy", ("memcpy", "memset")),
)
"""Kinds of kernels by a pattern of their names, in order. All others are elementwise."""
SHAPES: dict[str, dict[str, int]] = {
    "llama-3-8b, 4 layers": {
        "layers": 4,
        "hidden": 4096,
        "heads": 32,
        "kv_heads": 8,
        "ffn": 14336,
        "vocabulary": 32000,
    },
    "llama-1b, 8 layers": {
        "layers": 8,
        "hidden": 2048,
        "heads": 32,
        "kv_heads": 8,
        "ffn": 8192,
        "vocabulary": 32000,
    },
}
TOKENS = (512, 2048, 8192)
BATCHES = 4


def steps_by_part() -> Iterator[dict[str, Any]]:
    """Yield one row per shape and length: seconds of a step and of its kernels by kind, launches,
    and the time of layers with and without a CUDA graph.
    """
    for name, shape in SHAPES.items():
        for tokens in TOKENS:
            torch.cuda.empty_cache()
            model = Llama(**shape)
            optimizer = Adam(MainGradients(model))
            batches = [
                torch.randint(shape["vocabulary"], (1, tokens), device="cuda")
                for _ in range(BATCHES)
            ]
            yield {
                "model": name,
                "tokens": tokens,
                "micro_batches": BATCHES,
                **_step(model, optimizer, batches),
            } | _layers(shape, tokens)


def _step(model: Llama, optimizer: Adam, batches: list[torch.Tensor]) -> dict[str, Any]:
    def step() -> None:
        step_1f1b(model, batches, in_flight=1)
        optimizer.step()

    step_ms = median_ms(step, budget_s=1.0)
    start = time.perf_counter()
    step()
    host_ms = (time.perf_counter() - start) * 1e3
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    kinds: dict[str, float] = defaultdict(float)
    launches = 0
    for event in profiler.events() or ():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            launches += 1
            low = event.name.lower()
            kind = next(
                (kind for kind, words in KINDS if any(word in low for word in words)), "elementwise"
            )
            kinds[f"{kind}_ms"] += event.device_time_total / 1e3
    return {
        "step_ms": step_ms,
        "host_ms": host_ms,
        "launches": launches,
        "kernels_ms": sum(kinds.values()),
        **kinds,
    }


def _layers(shape: dict[str, int], tokens: int) -> dict[str, float]:
    """Return milliseconds of both passes of a layer, without and with a CUDA graph."""
    block = Llama(**{**shape, "layers": 1}).blocks[0]
    x = torch.randn(
        1, tokens, shape["hidden"], device="cuda", dtype=torch.bfloat16, requires_grad=True
    )
    gradient = torch.randn_like(x)
    eager = median_ms(lambda: block(x).backward(gradient))
    graphed = torch.cuda.make_graphed_callables(block, (x.detach().clone().requires_grad_(),))
    return {
        "layer_eager_ms": eager,
        "layer_graphed_ms": median_ms(lambda: graphed(x).backward(gradient)),
    }

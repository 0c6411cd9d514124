"""Time a training step as memory fills, and count the allocator's retries."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.kernels.llama import Adam, Llama, MainGradients, step_1f1b

SHARES = (0.5, 0.8, 0.85, 0.9, 0.93, 0.95, 0.96, 0.97, 0.98, 0.985, 0.99, 0.995, 1.0)
STEPS = 3
CASES: dict[str, dict[str, Any]] = {
    "one micro-batch in flight": {"in_flight": 1, "lengths": (8192,) * 8},
    "four micro-batches in flight": {"in_flight": 4, "lengths": (4096,) * 12},
    "four in flight of unlike lengths": {
        "in_flight": 4,
        "lengths": (4096, 2560, 3584, 1536, 4096, 3072, 2048, 3840),
    },
}


def nearly_full() -> Iterator[dict[str, Any]]:
    """Yield one row per case and per share of the limit that tensors use.

    A row has the seconds of a step, the number of retries and the reserved memory, or reports that
    memory ran out. `set_per_process_memory_fraction` limits the process, so that the peak of
    allocated tensors is the given share of the limit. Near the limit the allocator frees its cached
    blocks and tries again, as on a full device.
    """
    total = torch.cuda.get_device_properties(0).total_memory
    model = Llama(layers=12, hidden=2048, heads=32, kv_heads=8, ffn=8192, vocabulary=32000)
    optimizer = Adam(MainGradients(model))
    for name, case in CASES.items():
        batches = [torch.randint(32000, (1, length), device="cuda") for length in case["lengths"]]
        torch.cuda.set_per_process_memory_fraction(1.0)
        _, peak, _ = _steps(model, optimizer, batches, case["in_flight"])
        for share in SHARES:
            torch.cuda.empty_cache()
            torch.cuda.set_per_process_memory_fraction(min(1.0, peak / share / total))
            row = {
                "case": name,
                "share": share,
                "allocated_bytes": peak,
                "limit_bytes": int(peak / share),
            }
            before = torch.cuda.memory_stats()["num_alloc_retries"]
            try:
                seconds, _, reserved = _steps(model, optimizer, batches, case["in_flight"])
            except torch.cuda.OutOfMemoryError:
                model.zero_grad()
                yield row | {"ran_out": True}
                continue
            retries = (torch.cuda.memory_stats()["num_alloc_retries"] - before) / (STEPS + 1)
            yield row | {"step_s": seconds, "retries_per_step": retries, "reserved_bytes": reserved}
    torch.cuda.set_per_process_memory_fraction(1.0)


def _steps(
    model: Llama, optimizer: Adam, batches: list[torch.Tensor], in_flight: int
) -> tuple[list[float], int, int]:
    """Return (seconds of each step after the first, peak allocated bytes, peak reserved bytes)."""
    torch.cuda.reset_peak_memory_stats()
    seconds = []
    for _ in range(STEPS + 1):
        torch.cuda.synchronize()
        start = time.perf_counter()
        step_1f1b(model, batches, in_flight=in_flight)
        optimizer.step()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return seconds[1:], torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()

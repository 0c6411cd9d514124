"""Peak memory of one rank, and what running out of it looks like."""

from __future__ import annotations

import gc
import resource
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

CUDA_SOURCE = "cuda_allocator"
CPU_SOURCE = "resident_set_growth"


@dataclass(frozen=True, slots=True)
class PeakMemory:
    """Bytes at the fullest moment."""

    allocated: int
    """cuda: torch.cuda.max_memory_allocated(); cpu: growth of the resident set since before the model was built."""
    reserved: int
    """cuda: torch.cuda.max_memory_reserved(); cpu: the whole resident set at its peak."""


class MemoryMeter:
    """Watches this process from before the model is built."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self.source = CUDA_SOURCE if self._cuda else CPU_SOURCE
        gc.collect()
        if self._cuda:
            torch.cuda.reset_peak_memory_stats()
        else:
            _reset_resident_peak()
        self._resident_before = psutil.Process().memory_info().rss

    def peak(self) -> PeakMemory:
        if self._cuda:
            return PeakMemory(allocated=torch.cuda.max_memory_allocated(), reserved=torch.cuda.max_memory_reserved())
        peak = _resident_peak()
        return PeakMemory(allocated=max(0, peak - self._resident_before), reserved=peak)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a CUDA or CPU allocator gave up; torch's CPU allocator says so only in the text of a RuntimeError."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and ("can't allocate memory" in str(error) or "out of memory" in str(error))


def _reset_resident_peak() -> None:
    """Start the kernel's high-water mark afresh, so that importing libraries does not count; not every kernel lets us."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return


def _resident_peak() -> int:
    try:
        status = Path("/proc/self/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0]) * 1024
    except (OSError, IndexError, ValueError):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

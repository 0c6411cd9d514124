"""Measure a rank's peak memory, and detect out-of-memory errors."""

import contextlib
import gc
import importlib
import resource
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import distributed

from hp_tool.domain.measurement import Measurement


@dataclass(frozen=True, slots=True)
class PeakMemory:
    """Peak memory in bytes."""

    allocated: int
    """Allocated peak. On CUDA, torch.cuda.max_memory_allocated(). On a CPU, growth of the resident
    set since before the model was built, without mapped files.
    """
    reserved: int
    """Reserved peak. On CUDA, torch.cuda.max_memory_reserved(). On a CPU, the resident set."""


class MemoryMeter:
    """Measure this process's peak memory. Create the meter before the model."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self.source: Literal["cuda_allocator", "resident_set_growth"] = (
            "cuda_allocator" if self._cuda else "resident_set_growth"
        )
        if self._cuda:
            torch.cuda.reset_peak_memory_stats()
            return
        # torch.optim imports the compiler at its first step. Its tens of MB do not belong to the
        # model.
        importlib.import_module("torch._dynamo")
        gc.collect()
        with contextlib.suppress(OSError):  # Some kernels do not allow this.
            # Reset the peak, so that imports do not count.
            Path("/proc/self/clear_refs").write_text("5")
        self._before = _resident("RssAnon")

    def peak(self) -> PeakMemory:
        if self._cuda:
            return PeakMemory(
                allocated=torch.cuda.max_memory_allocated(),
                reserved=torch.cuda.max_memory_reserved(),
            )
        peak = _resident("VmHWM") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        # Mapped files (libraries) stay mapped, so the peak contains them. They are not the model's.
        files = _resident("RssFile") + _resident("RssShmem")
        return PeakMemory(allocated=max(0, peak - files - self._before), reserved=peak)

    def add_to(self, measurement: Measurement) -> Measurement:
        """Add the peak memory of all ranks to a measurement. All ranks must call it."""
        peaks: list[Any] = [None] * distributed.get_world_size()
        distributed.all_gather_object(peaks, self.peak())
        return replace(
            measurement,
            peak_memory_bytes=max(peak.allocated for peak in peaks),
            peak_reserved_bytes=max(peak.reserved for peak in peaks),
            peak_memory_bytes_per_rank=tuple(peak.allocated for peak in peaks),
            peak_memory_source=self.source,
        )


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if the device's memory was exhausted. In GPU runs, host memory does not count.

    torch's CPU allocator reports its failure only in the text of a RuntimeError.
    """
    if isinstance(error, torch.OutOfMemoryError):
        return True
    on_host = isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    )
    if on_host:
        return not torch.cuda.is_initialized()
    return isinstance(error, RuntimeError) and "out of memory" in str(error)


def _resident(kind: str) -> int:
    try:
        status = Path("/proc/self/status").read_text()
        return int(status.partition(f"\n{kind}:")[2].split()[0]) * 1024
    except (OSError, IndexError, ValueError):
        return 0

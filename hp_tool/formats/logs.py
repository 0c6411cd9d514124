"""Training logs of Megatron-LM, torchtitan and DeepSpeed: step times, throughput and memory that they print.

A log is read line by line; colours and prefixes are ignored.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from hp_tool.units import GIB, MIB

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_OUT_OF_MEMORY = re.compile(r"OutOfMemoryError|CUDA out of memory|HIP out of memory|CUBLAS_STATUS_ALLOC_FAILED")
MAX_STEPS = 100_000


@dataclass(slots=True, kw_only=True)
class LogFacts:
    """What a log says, in its order. A kind of figure that the trainer does not print stays empty."""

    step_s: list[float] = field(default_factory=list)
    """Seconds of optimizer steps; of a mean over several steps once."""
    tokens_per_second_per_gpu: list[float] = field(default_factory=list)
    samples_per_second: list[float] = field(default_factory=list)
    """Sequences of all devices together."""
    allocated_bytes: float | None = None
    """Peak of torch's allocator, the largest that was printed."""
    reserved_bytes: float | None = None
    out_of_memory: bool = False


def _megatron(line: str, facts: LogFacts) -> None:
    """iteration 10/ 100 | ... elapsed time per iteration (ms): 18130.0 | ...; memory (MB) | ... max allocated: 45678.2 |"""
    if match := re.search(r"elapsed time per iteration \(ms\):\s*([\d.]+)", line):
        facts.step_s.append(float(match[1]) / 1e3)
    if "memory (MB)" in line:
        facts.allocated_bytes = _most(facts.allocated_bytes, line, r"max allocated:\s*([\d.]+)", MIB)
        facts.reserved_bytes = _most(facts.reserved_bytes, line, r"max reserved:\s*([\d.]+)", MIB)


def _torchtitan(line: str, facts: LogFacts) -> None:
    """step: 10 loss: 7.85 ... memory: 40.34GiB(42.45%) tps: 7,043 tflops: 405.63 mfu: 41.02%; tps are one device's tokens."""
    if match := re.search(r"step:\s*\d+.*\btps:\s*([\d,]+)", line):
        facts.tokens_per_second_per_gpu.append(float(match[1].replace(",", "")))
        facts.reserved_bytes = _most(facts.reserved_bytes, line, r"memory:\s*([\d.]+)GiB", GIB)


def _deepspeed(line: str, facts: LogFacts) -> None:
    """global_step=10, RunningAvgSamplesPerSec=12.3, CurrSamplesPerSec=12.1, MemAllocated=10.2GB, MaxMemAllocated=20.5GB;
    Megatron-DeepSpeed: steps: 10 loss: 2.3 iter time (s): 1.234 samples/sec: 103.7
    """
    if match := re.search(r"CurrSamplesPerSec=([\d.]+)", line):
        facts.samples_per_second.append(float(match[1]))
        facts.allocated_bytes = _most(facts.allocated_bytes, line, r"MaxMemAllocated=([\d.]+)GB", GIB)
    if match := re.search(r"iter time \(s\):\s*([\d.]+)", line):
        facts.step_s.append(float(match[1]))


def _most(known: float | None, line: str, pattern: str, unit: float) -> float | None:
    match = re.search(pattern, line)
    return known if match is None else max(known or 0.0, float(match[1]) * unit)


READERS: dict[str, Callable[[str, LogFacts], None]] = {
    "megatron-lm": _megatron,
    "torchtitan": _torchtitan,
    "deepspeed": _deepspeed,
}
"""By name, as `trainer.reader` and `--format` write it."""


def read_log(lines: Iterable[str], *, reader: str) -> LogFacts:
    """What the lines say to one of READERS. Numbers that are not positive are no measurements."""
    facts = LogFacts()
    for line in lines:
        plain = _COLOUR.sub("", line)
        facts.out_of_memory |= _OUT_OF_MEMORY.search(plain) is not None
        if len(facts.step_s) + len(facts.tokens_per_second_per_gpu) + len(facts.samples_per_second) < MAX_STEPS:
            READERS[reader](plain, facts)
    for name in ("step_s", "tokens_per_second_per_gpu", "samples_per_second"):
        setattr(facts, name, [value for value in getattr(facts, name) if value > 0.0])
    return facts

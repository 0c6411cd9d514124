"""Log lines of each trainer, in the forms their code prints them."""

from __future__ import annotations

import pytest

from hp_tool.formats.logs import read_log
from hp_tool.units import GIB, MIB

MEGATRON = (
    " [2025-03-01 10:00:00.123] iteration       10/     500 | consumed samples:         1280 | "
    "elapsed time per iteration (ms): 18130.5 | throughput per GPU (TFLOP/s/GPU): 148.3 | learning rate: 1.2E-05 | "
    "global batch size:   128 | lm loss: 9.1E+00 | loss scale: 1.0 | grad norm: 1.234 |\n"
    "[Rank 0] (after 10 iterations) memory (MB) | allocated: 23455.1 | max allocated: 45678.2 | reserved: 50000.0 | "
    "max reserved: 51234.0\n"
    " [2025-03-01 10:01:00.123] iteration       20/     500 | consumed samples:         2560 | "
    "elapsed time per iteration (ms): 18010.0 | learning rate: 1.2E-05 |\n"
)
TITAN = (
    "[rank0]:[titan] 2025-03-01 10:00:00,123 - root - INFO - \x1b[31mstep: 10  \x1b[32mloss:  7.8512  "
    "\x1b[38;2;180;60;0mgrad_norm:  1.2034  \x1b[36mmemory: 40.34GiB(42.45%)  \x1b[34mtps: 7,043  "
    "\x1b[35mtflops: 405.63  \x1b[33mmfu: 41.02%\x1b[39m\n"
)
DEEPSPEED = (
    "[2025-03-01 10:00:00,123] [INFO] [timer.py:260:stop] epoch=0/micro_step=80/global_step=10, RunningAvgSamplesPerSec=61.2, "
    "CurrSamplesPerSec=64.0, MemAllocated=10.25GB, MaxMemAllocated=20.5GB\n"
)


def test_megatron() -> None:
    facts = read_log(MEGATRON.splitlines(), reader="megatron-lm")
    assert facts.step_s == [18.1305, 18.010]
    assert facts.allocated_bytes == pytest.approx(45678.2 * MIB)
    assert facts.reserved_bytes == pytest.approx(51234.0 * MIB)
    assert not facts.out_of_memory


def test_torchtitan_with_colours() -> None:
    facts = read_log([TITAN], reader="torchtitan")
    assert facts.tokens_per_second_per_gpu == [7043.0]
    assert facts.reserved_bytes == pytest.approx(40.34 * GIB)


def test_deepspeed() -> None:
    facts = read_log([DEEPSPEED, "steps: 10 loss: 2.3 iter time (s): 1.250 samples/sec: 102.4"], reader="deepspeed")
    assert facts.samples_per_second == [64.0]
    assert facts.step_s == [1.25]
    assert facts.allocated_bytes == pytest.approx(20.5 * GIB)


@pytest.mark.parametrize("reader", ["megatron-lm", "torchtitan", "deepspeed"])
def test_out_of_memory_is_seen(reader: str) -> None:
    line = "[rank3]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
    assert read_log([line], reader=reader).out_of_memory

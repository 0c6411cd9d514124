"""From a trainer's log to a measurement: which steps count, and how a run ended."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from hp_tool.cluster.logs import READERS, read_log
from hp_tool.cluster.trainers.runs import measurement
from hp_tool.domain.measurement import Hardware, Measurement
from hp_tool.domain.query import SearchSettings
from hp_tool.domain.units import MIB
from hp_tool.domain.workload import TrainingWorkload

HARDWARE = Hardware(gpu="h100-sxm-80gb", num_gpus=8)
WORK = TrainingWorkload(sequence_length=1024, global_batch_size=64)
SETTINGS = SearchSettings(steps=3, warmup_steps=2)
ENDED = Measurement(
    status="crashed",
    cause="exit code 0 without a result",
    exit_code=0,
    hardware=HARDWARE,
    wall_s=40.0,
)
CRASHED = replace(ENDED, cause="exit code 1 without a result: Segmentation fault", exit_code=1)
TIMEOUT = replace(ENDED, status="timeout", cause="not done after 30 s", exit_code=None)
MEGATRON = (
    " [2026-01-01] iteration {:8d}/ 100 | elapsed time per iteration (ms): {:.1f} | lm "
    "loss: 2.5E+00 |"
)
MEMORY = (
    "[Rank 0] (after 2 iterations) memory (MB) | allocated: 1.0 | max allocated: 1000.0 | "
    "reserved: 3.0 | max reserved: 2000.0"
)


def read(
    lines: list[str], *, reader: str = "megatron-lm", ended: Measurement = ENDED, **changes: Any
) -> Measurement:
    facts, settings = read_log(lines, reader=reader), replace(SETTINGS, **changes)
    return measurement(
        facts, ended=ended, workload=WORK, num_gpus=HARDWARE.num_gpus, settings=settings
    )


def megatron(*milliseconds: float, first: int = 1, interval: int = 1) -> list[str]:
    return [MEGATRON.format(first + interval * i, ms) for i, ms in enumerate(milliseconds)]


def test_megatron_after_its_warm_up() -> None:
    found = read([*megatron(9000, 800, 500, 400, 600), MEMORY])
    assert (found.status, found.step_s, found.step_times_s) == ("ok", 0.5, (0.5, 0.4, 0.6))
    assert found.tokens_per_second_per_gpu == pytest.approx(64 * 1024 / 0.5 / 8)
    assert (found.peak_memory_bytes, found.peak_reserved_bytes) == (1000 * MIB, 2000 * MIB)
    assert found.peak_memory_source == "cuda_allocator" and found.losses == (2.5,) * 5
    assert found.hardware == HARDWARE and found.wall_s == 40.0 and found.cause is None


def test_means_over_several_steps_count_as_all_of_them() -> None:
    found = read(megatron(900, 500, first=2, interval=2), steps=2)
    assert found.step_times_s == (0.5,) and found.cause is None


def test_a_run_that_goes_on_from_a_checkpoint_counts_from_its_own_start() -> None:
    assert read(megatron(9000, 800, 500, 400, 600, first=1001)).step_times_s == (0.5, 0.4, 0.6)


def test_torchtitan_prints_on_every_rank_and_devices_tokens() -> None:
    line = (
        "[titan] step: {:2d}  loss:  7.85  memory: 40.00GiB(42.45%)  tps: {:,}  tflops: 405.63  "
        "mfu: 41.02%"
    )
    lines = [
        line.format(step, tps)
        for step, tps in ((1, 10), (2, 8000), (3, 16384), (4, 8192), (5, 16384))
        for _ in range(8)
    ]
    found = read(lines, reader="torchtitan")
    assert found.step_times_s == pytest.approx((0.5, 1.0, 0.5))
    assert found.tokens_per_second_per_gpu == pytest.approx(16384)
    assert found.peak_memory_bytes is None and found.peak_reserved_bytes == 40 * 2**30


def test_deepspeed_prints_samples_of_all_devices() -> None:
    line = (
        "epoch=0/micro_step={}/global_step={}, RunningAvgSamplesPerSec=1.0, "
        "CurrSamplesPerSec={}, MaxMemAllocated=20.5GB"
    )
    found = read([line.format(8 * n, n, 16.0 * n) for n in range(1, 6)], reader="deepspeed")
    assert found.step_times_s == pytest.approx((64 / 48, 1.0, 0.8))


def test_json_lines_with_other_things_between_them() -> None:
    lines = ["starting", "{not json", "[1, 2]"] + [
        json.dumps(
            {
                "step": n,
                "step_s": 0.1 * n,
                "loss": 3.0 - n,
                "peak_allocated_bytes": 5e9,
                "mood": "good",
            }
        )
        for n in range(1, 6)
    ]
    found = read(lines, reader="json")
    assert (
        found.step_times_s == pytest.approx((0.3, 0.4, 0.5))
        and found.peak_memory_bytes == 5_000_000_000
    )


def test_a_job_that_printed_all_its_steps_is_measured_however_it_ended() -> None:
    lines = megatron(9, 8, 5, 4, 6)
    for ended in (ENDED, CRASHED, TIMEOUT):
        assert read(lines, ended=ended).status == "ok"


def test_a_time_limit_ends_a_run_with_the_steps_it_has() -> None:
    found = read(megatron(9, 8, 5), ended=TIMEOUT)
    assert (found.status, found.step_times_s) == ("ok", (0.005,))
    assert found.cause == "1 of 3 steps measured: not done after 30 s"
    assert read(megatron(9, 8), ended=TIMEOUT) == TIMEOUT


def test_a_crash_after_some_steps_is_a_crash() -> None:
    assert read(megatron(9, 8, 5), ended=CRASHED) == CRASHED


def test_out_of_memory_is_told_by_its_line() -> None:
    line = "[rank3]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
    found = read([*megatron(9, 8), line, "[rank0]: Connection closed by peer"], ended=CRASHED)
    assert (found.status, found.cause) == ("oom", line)
    survived = read(
        [line, *megatron(9, 8, 5, 4, 6)]
    )  # the trainer caught it, and went on to a good end
    assert survived.status == "ok"


def test_a_log_that_the_reader_does_not_understand_says_so() -> None:
    found = read(megatron(9, 8, 5, 4, 6), reader="torchtitan")
    assert found.status == "crashed" and "right reader" in (found.cause or "")
    found = read(megatron(9, 8))
    assert found.status == "crashed" and "warm-up" in (found.cause or "")


def test_a_run_that_was_taken_away_says_nothing() -> None:
    taken = replace(ENDED, status="preempted", cause="the node is down")
    assert read(megatron(9, 8, 5, 4, 6), ended=taken) == taken


@pytest.mark.parametrize("reader", sorted(READERS))
def test_hostile_logs_are_read_in_time(reader: str) -> None:
    long = "9" * 1_000_000
    lines = [
        long,
        f"MaxMemAllocated={long}",
        f"step: {long} tps: {long}",
        f'{{"step": {long}, "step_s": 1e999}}',
        "{" * 100_000,
    ]
    assert read(lines, reader=reader).status == "crashed"

"""What a run records of the state of its GPUs, and which failures are a device's own."""

from __future__ import annotations

import pytest

from hp_tool.cluster.profiler.__main__ import failure_report
from hp_tool.domain.measurement import DeviceState

pytestmark = pytest.mark.components

# nvidia-smi --query-gpu=... --format=csv,noheader,nounits on 2 x H100 and a card that tells little.
PRINTED = """\
1755, 1980, 0x0000000000000004, 0, 61, 698.12, 700.00, 550.54.15
345, 1980, 0x0000000000000001, 3, 33, 71.00, 700.00, 550.54.15
[N/A], [N/A], [N/A], [N/A], 40, [N/A], [N/A], 550.54.15
"""


@pytest.fixture(autouse=True, scope="module")
def _torch() -> None:
    """Not on import: every process of pytest-xdist would load it."""
    pytest.importorskip("torch")


def test_clocks_throttling_and_errors_of_memory_are_recorded() -> None:
    from hp_tool.cluster.profiler.backend import parse_devices

    states, driver = parse_devices(PRINTED, host="n1")
    assert driver == "550.54.15"
    assert states[0] == DeviceState(
        host="n1",
        sm_clock_hz=1.755e9,
        sm_clock_max_hz=1.98e9,
        throttled_by="0x4",
        uncorrected_ecc_errors=0,
        temperature_c=61.0,
        power_w=698.12,
        power_limit_w=700.0,
    )
    assert (states[1].throttled_by, states[1].uncorrected_ecc_errors) == (
        None,
        3,
    )  # idle is not throttled
    assert states[2] == DeviceState(host="n1", temperature_c=40.0)
    assert parse_devices("", host="n1") == ((), None)


@pytest.mark.parametrize(
    ("message", "status"),
    [
        ("CUDA error: uncorrectable ECC error encountered", "preempted"),
        ("CUDA error: hardware stack error", "preempted"),
        ("CUDA error: an illegal memory access was encountered", "crashed"),
        ("shapes do not match", "crashed"),
    ],
)
def test_a_broken_device_is_not_the_configurations_fault(message: str, status: str) -> None:
    report = failure_report(RuntimeError(message), rank=3)
    assert report.status == status
    assert bool(report.suspects) == (status == "preempted")


def test_a_host_without_memory_is_not_a_device_without(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    on_host = RuntimeError(
        "[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"
    )
    assert failure_report(on_host, rank=0).status == "oom"  # of a run on CPUs
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert failure_report(on_host, rank=0).status == "crashed"
    assert (
        failure_report(
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), rank=0
        ).status
        == "oom"
    )

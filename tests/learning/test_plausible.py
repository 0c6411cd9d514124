"""Reported figures that cannot be are refused: one of them alone would decide what its cluster is
told.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from hp_tool.errors import InputError
from hp_tool.loop.learning.reports import read_report


def report(gpu: str = "h100-sxm-80gb", **measurement: Any) -> bytes:
    query = {
        "kind": "training",
        "model": "llama-3-8b",
        "cluster": {"gpu": gpu, "num_gpus": 8},
        "training": {"sequence_length": 4096, "global_batch_size": 64, "precision": "bf16"},
    }
    figures = {"status": "ok", "step_s": 5.0, **measurement}
    return json.dumps(
        {"query": query, "parallel": {"tensor_parallel_size": 8}, "measurement": figures}
    ).encode()


@pytest.mark.parametrize(
    "figures", [{"step_s": 2.0}, {"step_s": 500.0}, {"peak_memory_bytes": 30 * 10**9}]
)
def test_what_a_run_may_show_is_taken(figures: dict[str, Any]) -> None:
    taken = read_report(report(**figures), source="reported").measurement
    assert (
        figures.items()
        <= {"step_s": taken.step_s, "peak_memory_bytes": taken.peak_memory_bytes}.items()
    )


@pytest.mark.parametrize(
    ("figures", "field"),
    [
        ({"step_s": 0.005}, "step_s"),
        ({"step_s": 1.0}, "step_s"),  # 1.26e16 FLOPs on 8 x 0.99e15 a second
        ({"step_s": 5_000.0}, "step_s"),
        ({"peak_memory_bytes": 10**12}, "peak_memory_bytes"),
    ],
)
def test_what_no_run_can_show_is_refused(figures: dict[str, Any], field: str) -> None:
    with pytest.raises(InputError, match=r"is (implausible|impossible)") as caught:
        read_report(report(**figures), source="file")
    assert (caught.value.field, caught.value.code) == (f"measurement.{field}", "implausible")


WHOLE = {"compute": 3.0, "attention": 0.5, "tensor_parallel": 1.0, "optimizer": 0.5}
"""Parts of a step of 5 s."""
H100 = {"gpu": "h100-sxm-80gb"}


def test_the_parts_of_a_whole_step_are_taken() -> None:
    for device in (H100, H100 | {"device_name": "NVIDIA H100 80GB HBM3", "num_gpus": 8}):
        taken = read_report(report(parts_s=WHOLE, hardware=device), source="reported").measurement
        assert taken.parts_s == WHOLE


@pytest.mark.parametrize(
    ("figures", "field", "code"),
    [
        ({"hardware": H100 | {"num_gpus": 4}}, "hardware.num_gpus", "hardware_mismatch"),
        (
            {"hardware": {"gpu": "h100-sxm-80gb", "device_name": "NVIDIA A100-SXM4-80GB"}},
            "hardware.device_name",
            "hardware_mismatch",
        ),
        (
            {"hardware": {"gpu": "h100-sxm-80gb", "device_name": "AMD Instinct"}},
            "hardware.device_name",
            "hardware_mismatch",
        ),
        (
            {"parts_s": WHOLE | {"compute": 3.5, "optimizer": 0.0}},
            "parts_s",
            "implausible",
        ),  # inference, or no whole step
        (
            {"parts_s": WHOLE | {"compute": 0.5, "tensor_parallel": 3.5}},
            "parts_s",
            "implausible",
        ),  # 1.6 s of FLOPs at the peak
    ],
)
def test_a_step_of_another_run_is_refused(figures: dict[str, Any], field: str, code: str) -> None:
    """What `explain --learn` compares of a trace, as far as a report tells it."""
    with pytest.raises(InputError) as caught:
        read_report(report(**figures), source="reported")
    assert (caught.value.field, caught.value.code) == (f"measurement.{field}", code)


@pytest.mark.parametrize(
    "figures",
    [
        {"step_s": 1e-300},
        {"step_s": 1e18},
        {"step_s": -1.0},
        {"tokens_per_second_per_gpu": 0.0},
        {"peak_memory_bytes": 0},
        {"peak_memory_bytes": 1 << 63},
        {"wall_s": -3.0},
        {"step_times_s": [1.0, -1.0]},
    ],
)
def test_a_number_out_of_range_names_its_field_and_the_range(figures: dict[str, Any]) -> None:
    for gpu in ("cpu", "h100-sxm-80gb"):
        with pytest.raises(InputError, match="must be from") as caught:
            read_report(report(gpu, **figures), source="reported")
        assert caught.value.code == "invalid_value"
        assert str(caught.value.field).startswith(f"measurement.{next(iter(figures))}")


def test_a_processor_is_as_fast_as_its_host() -> None:
    assert (
        read_report(report("cpu", step_s=5_000.0), source="reported").measurement.step_s == 5_000.0
    )

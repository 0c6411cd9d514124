"""Traces of two public projects, with parts worked out by hand.

HolisticTraceAnalysis and TraceLens publish them (MIT). Each expectation follows their
documentation: kernels are classed by hand, and an instant belongs to what computes, then to what
communicates, then to copies, then to nobody.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.command_line import hp_tool

DATA = os.environ.get("HP_REFERENCE_DATA")
FOLDER = Path(DATA or "none") / "traces"
EXPECTED: dict[str, tuple[str, float, dict[str, float]]] = {
    # Forward passes of AlexNet, no step marked: 79 kernels, then 55.5 ms of copies from pageable
    # memory.
    "hta_alexnet": (
        "inference",
        12_920_244.0,
        {"compute": 10_638.0, "offload": 55_503.0, "overhead": 12_854_103.0},
    ),
    # gloo alone: two all-reduces of 0 to 173,209.713 and 8,306.169 to 178,777.427 us lie in the one
    # marked step.
    "hta_cpu_only": (
        "unknown",
        210_109.162,
        {"data_parallel": 178_777.427, "overhead": 31_331.735},
    ),
    # One step of a toy model on an MI250; the optimizer is one multi_tensor_apply kernel.
    "hta_mi250_rocm": (
        "training",
        9_178.654,
        {"compute": 102.4, "optimizer": 8.481, "offload": 38.161, "overhead": 9_029.612},
    ),
    # Three steps of ResNet-50 under DistributedDataParallel; the median one is the first.
    "hta_nccl": (
        "training",
        221_861.538,
        {"compute": 38_698.867, "data_parallel": 10_046.926, "optimizer": 693.145},
    ),
    # Two steps of a recommendation model on 128 ranks; NCCL names all its kernels SendRecv, torch's
    # calls tell them apart.
    "hta_sampled_rank0": (
        "training",
        602_994.0,
        {
            "expert_parallel": 77_830.0,
            "data_parallel": 94_328.0,
            "optimizer": 3_076.0,
            "overhead": 324_314.0,
        },
    ),
    # One forward pass of a small BERT in inference mode.
    "tracelens_h100_bert_small": (
        "inference",
        4_366.361,
        {"compute": 269.79, "attention": 37.408, "overhead": 4_056.923},
    ),
    # Kernels of a ResNet's step alone: MIOpen's convolutions, torch's batch norms forward and
    # backward.
    "tracelens_mi210_gpu_only": ("training", 5_979.503, {"compute": 5_343.37, "overhead": 636.133}),
    # A decode step of SGLang: one graph of 544 kernels after a copy that the host waits 463 ms for.
    "tracelens_sglang_decode": (
        "serving",
        473_749.943,
        {"compute": 7_628.362, "attention": 2_127.863, "unknown": 12.177},
    ),
}


def explained(name: str) -> dict[str, Any]:
    path = FOLDER / f"{name}.json.gz"
    if DATA is None or not path.exists():
        pytest.skip("HP_REFERENCE_DATA names no folder with traces")
    ended = hp_tool("explain", str(path), "--json")
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


@pytest.mark.parametrize("name", EXPECTED)
def test_a_public_trace_has_the_parts_worked_out_by_hand(name: str) -> None:
    workload, step_us, parts_us = EXPECTED[name]
    answer = explained(name)
    (rank,) = answer["ranks"]
    assert answer["workload"] == workload
    assert 1e6 * answer["step_s"] == pytest.approx(step_us, abs=0.1)
    assert {part: 1e6 * rank["parts_s"][part] for part in parts_us} == pytest.approx(
        parts_us, abs=0.1
    )
    assert sum(rank["parts_s"].values()) == pytest.approx(answer["step_s"])


def test_calls_of_torch_name_the_operations_of_old_kernels() -> None:
    """Of the first step: two all-to-alls (30,669 and 62,783 us), two all-reduces of gradients, one
    all-gather.
    """
    links = {
        (each["part"], each["operation"]): each["messages"]
        for each in explained("hta_sampled_rank0")["links"]
    }
    assert links == {
        ("expert_parallel", "all_to_all"): 2.0,
        ("data_parallel", "all_reduce"): 2.0,
        ("data_parallel", "all_gather"): 1.0,
    }


@pytest.mark.parametrize(
    ("name", "word"), [("hta_alexnet", "inference"), ("tracelens_sglang_decode", "serving")]
)
def test_a_trace_that_trains_nothing_is_called_what_it_is(name: str, word: str) -> None:
    explained(name)
    printed = hp_tool("explain", str(FOLDER / f"{name}.json.gz")).stdout
    assert printed.startswith(f"{word}: ") and f" {word} trace" in printed

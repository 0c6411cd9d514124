"""Device names as drivers give them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hp_tool.launchers import local as devices


@pytest.mark.parametrize(
    ("driver", "catalogue"),
    [
        ("NVIDIA H100 80GB HBM3", "h100-sxm-80gb"),
        ("NVIDIA H100 PCIe", "h100-pcie-80gb"),
        ("NVIDIA H800", "h800-sxm-80gb"),
        ("NVIDIA H800 PCIe", "nvidia-h800-pcie"),
        ("NVIDIA H200", "h200-sxm-141gb"),
        ("NVIDIA H200 NVL", "nvidia-h200-nvl"),
        ("NVIDIA A100-SXM4-80GB", "a100-sxm-80gb"),
        ("NVIDIA A100 80GB PCIe", "nvidia-a100-80gb-pcie"),
        ("NVIDIA GB200", "gb200-nvl72"),
        ("NVIDIA B200", "b200-sxm-180gb"),
        ("Tesla V100-SXM2-32GB", "v100-sxm-32gb"),
        ("NVIDIA L40S", "l40s-48gb"),
    ],
)
def test_catalogue_name(driver: str, catalogue: str) -> None:
    assert devices.catalogue_name(driver) == catalogue


def _fake_nvidia_smi(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = folder / "nvidia-smi"
    program.write_text('#!/bin/sh\nfor _ in 1 2 3 4; do echo "NVIDIA H200"; done\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def test_gpus_are_counted_as_far_as_they_are_visible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _fake_nvidia_smi(tmp_path, monkeypatch)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    found = devices.detect()
    assert (found.gpu, found.num_gpus, found.device_name) == ("h200-sxm-141gb", 4, "NVIDIA H200")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,2")
    assert devices.detect().num_gpus == 2
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert devices.detect().gpu == "cpu"


def test_a_cpu_host_offers_more_processes_than_cores_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _fake_nvidia_smi(tmp_path, monkeypatch)
    found = devices.detect(cpu_only=True)
    assert found.gpu == "cpu"
    assert found.num_gpus == devices.OVERSUBSCRIPTION_LIMIT * (os.cpu_count() or 1)
    assert found.oversubscription > 1

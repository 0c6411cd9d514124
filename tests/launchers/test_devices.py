"""Device names as drivers give them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hp_tool import catalog
from hp_tool.cluster.launchers import local as devices

DRIVERS = {
    "NVIDIA H100 80GB HBM3": "h100-sxm-80gb",
    "NVIDIA H100 PCIe": "h100-pcie-80gb",
    "NVIDIA H800": "h800-sxm-80gb",
    "NVIDIA H800 PCIe": "nvidia-h800-pcie",
    "NVIDIA H200": "h200-sxm-141gb",
    "NVIDIA H200 NVL": "h200-nvl-141gb",
    "NVIDIA H100 NVL": "h100-nvl-94gb",
    "NVIDIA B300 SXM6 AC": "b300-sxm-288gb",
    "NVIDIA GB300": "gb300-nvl72",
    "NVIDIA GH200 480GB": "gh200-96gb",
    "NVIDIA GH200 144G HBM3e": "nvidia-gh200-144g-hbm3e",
    "NVIDIA H20": "h20-sxm-96gb",
    "NVIDIA H20-3e": "h20-sxm-141gb",
    "NVIDIA A800-SXM4-80GB": "a800-sxm-80gb",
    "Tesla V100-SXM3-32GB-H": "v100-sxm3-32gb-h",
    "NVIDIA L4": "l4-24gb",
    "NVIDIA A10G": "a10g-24gb",
    "NVIDIA GeForce RTX 4090": "rtx-4090-24gb",
    "NVIDIA GeForce RTX 4090 D": "nvidia-geforce-rtx-4090-d",
    "NVIDIA GeForce RTX 5090": "rtx-5090-32gb",
    "NVIDIA RTX PRO 6000 Blackwell Server Edition": "rtx-pro-6000-96gb",
    "NVIDIA A100-SXM4-80GB": "a100-sxm-80gb",
    "NVIDIA A100-SXM4-40GB": "a100-sxm-40gb",
    "NVIDIA A100 80GB PCIe": "nvidia-a100-80gb-pcie",
    "NVIDIA GB200": "gb200-nvl72",
    "NVIDIA B200": "b200-sxm-180gb",
    "Tesla V100-SXM2-32GB": "v100-sxm-32gb",
    "NVIDIA L40S": "l40s-48gb",
    "NVIDIA L20": "l20-48gb",
    "NVIDIA A40": "a40-48gb",
    "NVIDIA A40-48Q": "nvidia-a40-48q",
    "NVIDIA RTX A6000": "rtx-a6000-48gb",
    "NVIDIA RTX 6000 Ada Generation": "rtx-6000-ada-48gb",
    "NVIDIA GeForce RTX 3090": "rtx-3090-24gb",
    "NVIDIA GeForce RTX 3090 Ti": "nvidia-geforce-rtx-3090-ti",
    "NVIDIA GB10": "gb10-128gb",
    "Tesla T4": "t4-16gb",
}
"""Names that are not in the catalogue stay close to the driver's."""


def test_catalogue_name(subtests: pytest.Subtests) -> None:
    for driver, catalogue in DRIVERS.items():
        with subtests.test(driver=str(driver), catalogue=str(catalogue)):
            assert devices.catalogue_name(driver) == catalogue


def test_every_nvidia_gpu_of_the_catalogue_is_recognised() -> None:
    known = {name for name in catalog.names("gpus") if not name.startswith(("mi", "gaudi", "cpu"))}
    assert known == {devices.catalogue_name(driver) for driver in DRIVERS} & set(
        catalog.names("gpus")
    )


def _fake_nvidia_smi(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = folder / "nvidia-smi"
    program.write_text('#!/bin/sh\nfor _ in 1 2 3 4; do echo "NVIDIA H200"; done\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def test_gpus_are_counted_as_far_as_they_are_visible(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _fake_nvidia_smi(tmp_path, monkeypatch)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    found = devices.detect_hardware()
    assert (found.gpu, found.num_gpus, found.device_name) == ("h200-sxm-141gb", 4, "NVIDIA H200")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,2")
    assert devices.detect_hardware().num_gpus == 2
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert devices.detect_hardware().gpu == "cpu"


def test_a_cpu_host_offers_more_processes_than_cores_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _fake_nvidia_smi(tmp_path, monkeypatch)
    found = devices.detect_hardware(cpu_only=True)
    assert found.gpu == "cpu"
    assert found.num_gpus == devices.OVERSUBSCRIPTION_LIMIT * (os.cpu_count() or 1)
    assert found.oversubscription > 1

"""Map GPU names reported by drivers to catalogue names."""

from __future__ import annotations

import re

_NAME_RULES = (
    (r"GB300", "gb300-nvl72"),
    (r"B300", "b300-sxm-288gb"),
    (r"GB200", "gb200-nvl72"),
    (r"B200", "b200-sxm-180gb"),
    (r"GH200 480GB", "gh200-96gb"),
    (r"H200 NVL", "h200-nvl-141gb"),
    (r"(?<!G)H200", "h200-sxm-141gb"),
    (r"H800(?! (PCIe|NVL))", "h800-sxm-80gb"),
    (r"H100 NVL", "h100-nvl-94gb"),
    (r"H100 PCIe", "h100-pcie-80gb"),
    (r"H100 80GB HBM3", "h100-sxm-80gb"),
    (r"H20$", "h20-sxm-96gb"),
    (r"H20-3e$", "h20-sxm-141gb"),
    (r"A100-SXM4-80GB", "a100-sxm-80gb"),
    (r"A100-SXM4-40GB", "a100-sxm-40gb"),
    (r"A800-SXM4-80GB", "a800-sxm-80gb"),
    (r"V100-SXM3-32GB-H", "v100-sxm3-32gb-h"),
    (r"V100-SXM[23]-32GB", "v100-sxm-32gb"),
    (r"(Tesla|NVIDIA) T4$", "t4-16gb"),
    (r"L40S", "l40s-48gb"),
    (r"L20$", "l20-48gb"),
    (r"L4$", "l4-24gb"),
    (r"A10G", "a10g-24gb"),
    (r"NVIDIA A40$", "a40-48gb"),
    (r"RTX A6000$", "rtx-a6000-48gb"),
    (r"RTX 6000 Ada Generation$", "rtx-6000-ada-48gb"),
    (r"GB10$", "gb10-128gb"),
    (r"RTX PRO 6000 Blackwell", "rtx-pro-6000-96gb"),
    (r"GeForce RTX 5090$", "rtx-5090-32gb"),
    (r"GeForce RTX 4090$", "rtx-4090-24gb"),
    (r"GeForce RTX 3090$", "rtx-3090-24gb"),
    (r"MI355X", "mi355x-288gb"),
    (r"MI350X", "mi350x-288gb"),
    (r"MI325X", "mi325x-256gb"),
    (r"MI300X", "mi300x-192gb"),
)
"""Pairs of (regular expression for the driver's name of an NVIDIA or AMD GPU, catalogue name). The
first match wins.
"""
RECOGNIZED_GPUS = frozenset(name for _, name in _NAME_RULES)
"""Catalogue GPUs that can be identified from the driver's name."""


def catalogue_gpu_name(device: str) -> str | None:
    """Return the catalogue name of a GPU from its driver's name; None if no rule matches."""
    return next((name for pattern, name in _NAME_RULES if re.search(pattern, device)), None)


def matches_gpu(device: str, *, gpu: str) -> bool | None:
    """Return whether the driver's name `device` belongs to the catalogue GPU `gpu`; None if the
    name is ambiguous.
    """
    known = catalogue_gpu_name(device)
    if known == gpu:
        return True
    return (
        False if known is not None or gpu.partition("-")[0].lower() not in device.lower() else None
    )

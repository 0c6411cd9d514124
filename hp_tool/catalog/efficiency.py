"""Efficiency profiles: the fitted constants of a GPU and of a framework, put together."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

from hp_tool import documents
from hp_tool.catalog import records
from hp_tool.domain.efficiency import EfficiencyProfile, FrameworkEfficiency, GpuEfficiency, Link, Roofline
from hp_tool.domain.hardware import GpuSpec
from hp_tool.errors import UnsupportedError

_FOLDER = Path(__file__).parent / "data" / "efficiency"
_GENERIC = "generic"
"""Constants for GPUs nobody measured: those typical of the measured ones."""


def efficiency(*, gpu: GpuSpec, framework: str) -> EfficiencyProfile:
    """The profile the cost model wants; a GPU without measurements gets generic constants, marked `measured: false`.

    UnsupportedError for a framework without a profile.
    """
    return EfficiencyProfile(
        gpu=gpu_efficiency(gpu.name if gpu.kind == "gpu" else "cpu"), framework=_framework(framework, gpu.name)
    )


def frameworks() -> list[str]:
    """Frameworks that have a profile."""
    return sorted(path.parent.name for path in (_FOLDER / "frameworks").glob("*/default.yaml"))


@functools.cache
def gpu_efficiency(name: str) -> GpuEfficiency:
    path = _FOLDER / "gpus" / f"{name}.yaml"
    if path.parent != _FOLDER / "gpus" or not path.is_file():
        return dataclasses.replace(gpu_efficiency(_GENERIC), gpu=_GENERIC, measured=False)
    fields = documents.parse(documents.read_text(path), origin=path)
    parts: dict[str, Any] = {}
    for key in ("attention", "decode_attention"):
        if key in fields:
            parts[key] = records.build(Roofline, fields[key], field=key, origin=path)
    for key in ("nvlink", "all_to_all", "small_all_reduce"):
        if key in fields:
            parts[key] = records.build(Link, fields[key], field=key, origin=path)
    for key in ("matmul", "thin_matmul"):
        if key in fields:
            parts[key] = {p: records.build(Roofline, roof, field=key, origin=path) for p, roof in fields[key].items()}
    return GpuEfficiency(**{**fields, **parts})


@functools.cache
def _framework(name: str, gpu: str) -> FrameworkEfficiency:
    """The framework's constants on this GPU, else those of its newest measured software."""
    if name not in frameworks():
        raise UnsupportedError(
            f"no efficiency profile for framework {name!r}; known: {', '.join(frameworks())}", field="training.framework"
        )
    folder = _FOLDER / "frameworks" / name
    own = folder / f"{gpu}.yaml"
    path = own if own.parent == folder and own.is_file() else folder / "default.yaml"
    fields = documents.parse(documents.read_text(path), origin=path)
    network = records.build(Link, fields.pop("network"), field="network", origin=path)
    return FrameworkEfficiency(network=network, **fields)

"""Efficiency profiles: the fitted constants of a GPU and of a framework, put together."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path

from hp_tool import documents
from hp_tool.catalog import machines, records
from hp_tool.cost.overlap import with_overlap
from hp_tool.cost.step_time import without_host
from hp_tool.domain.efficiency import EfficiencyProfile, FrameworkEfficiency, GpuEfficiency, Link
from hp_tool.domain.hardware import GpuSpec
from hp_tool.domain.workload import OverlapSpec
from hp_tool.errors import UnsupportedError

_FOLDER = Path(__file__).parent / "data" / "efficiency"
_GENERIC = "generic"
"""Constants for GPUs nobody measured: those typical of the measured ones."""


def efficiency(
    *,
    gpu: GpuSpec,
    framework: str,
    overlap: OverlapSpec | None = None,
    cuda_graphs: bool = False,
    cluster: str | None = None,
) -> EfficiencyProfile:
    """The profile the cost model wants; a GPU without measurements gets generic constants, marked `measured: false`.

    `cluster`: its name; where `hp-tool calibrate --cluster` measured it, its own constants stand before its GPU's.

    UnsupportedError for a framework without a profile, and for an overlap that nobody measured.
    """
    constants = _framework(framework, gpu.name)
    if overlap is not None:
        constants = with_overlap(constants, overlap=overlap, newest=_framework(framework, "default"))
    if cuda_graphs:
        constants = without_host(constants)
    machine = machines.machine_profile(cluster) if cluster is not None else None
    if machine is None or machine.gpu.gpu != gpu.name:
        return EfficiencyProfile(gpu=gpu_efficiency(gpu.name if gpu.kind == "gpu" else "cpu"), framework=constants)
    network = machine.network or constants.network
    return EfficiencyProfile(gpu=machine.gpu, framework=dataclasses.replace(constants, network=network))


def frameworks() -> list[str]:
    """Frameworks that have a profile."""
    return sorted(path.parent.name for path in (_FOLDER / "frameworks").glob("*/default.yaml"))


@functools.lru_cache(maxsize=256)
def gpu_efficiency(name: str) -> GpuEfficiency:
    """What kernels reach on this GPU; the generic profile, marked `measured: false`, where nobody measured it."""
    path = _profiles(_FOLDER / "gpus").get(name)
    if path is None:
        return dataclasses.replace(gpu_efficiency(_GENERIC), gpu=_GENERIC, measured=False)
    return machines.gpu_constants(documents.parse(documents.read_text(path), origin=path), origin=path)


@functools.lru_cache(maxsize=256)
def _framework(name: str, gpu: str) -> FrameworkEfficiency:
    """The framework's constants on this GPU, else those of its newest measured software."""
    if name not in frameworks():
        raise UnsupportedError(
            f"no efficiency profile for framework {name!r}; known: {', '.join(frameworks())}", field="training.framework"
        )
    profiles = _profiles(_FOLDER / "frameworks" / name)
    path = profiles.get(gpu, profiles["default"])
    fields = documents.parse(documents.read_text(path), origin=path)
    network = records.build(Link, fields.pop("network"), field="network", origin=path)
    return FrameworkEfficiency(network=network, **fields)


@functools.cache
def _profiles(folder: Path) -> dict[str, Path]:
    """The profiles there are, by name: one that a query names is looked up here, and never becomes part of a path."""
    return {path.stem: path for path in folder.glob("*.yaml")}

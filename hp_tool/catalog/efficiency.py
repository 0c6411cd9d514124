"""Efficiency profiles: the fitted constants of a GPU and of a framework, put together.

Clusters of one's own that `hp-tool calibrate --cluster` measured have one file each in one's own catalogue folders.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hp_tool import documents
from hp_tool.catalog import library, records
from hp_tool.cost.overlap import with_overlap
from hp_tool.cost.step_time import without_host
from hp_tool.domain.efficiency import EfficiencyProfile, FrameworkEfficiency, GpuEfficiency, Link, Roofline
from hp_tool.domain.hardware import GpuSpec
from hp_tool.domain.workload import OverlapSpec
from hp_tool.errors import UnsupportedError

_FOLDER = Path(__file__).parent / "data" / "efficiency"
_GENERIC = "generic"
"""Constants for GPUs nobody measured: those typical of the measured ones."""
_OWN_FOLDER = "efficiency"


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineProfile:
    """What was measured on one cluster."""

    gpu: GpuEfficiency
    network: Link | None = None
    """Ring collectives across nodes; None: not measured, so the framework's constants hold."""


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
    machine = machine_profile(cluster) if cluster is not None else None
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
    return gpu_constants(documents.read(path), origin=path)


@functools.lru_cache(maxsize=256)
def _framework(name: str, gpu: str) -> FrameworkEfficiency:
    """The framework's constants on this GPU, else those of its newest measured software."""
    if name not in frameworks():
        raise UnsupportedError(
            f"no efficiency profile for framework {name!r}; known: {', '.join(frameworks())}", field="training.framework"
        )
    profiles = _profiles(_FOLDER / "frameworks" / name)
    path = profiles.get(gpu, profiles["default"])
    fields = documents.read(path)
    network = records.build(Link, fields.pop("network"), field="network", origin=path)
    return FrameworkEfficiency(network=network, **fields)


@functools.cache
def _profiles(folder: Path) -> dict[str, Path]:
    """The profiles there are, by name: one that a query names is looked up here, and never becomes part of a path."""
    return {path.stem: path for path in folder.glob("*.yaml")}


def machine_profile(cluster: str) -> MachineProfile | None:
    """The profile of the cluster called so; None where nobody measured it."""
    return _read_machine(_file_name(cluster), library.own_folders())


def save_machine_profile(cluster: str, profile: MachineProfile) -> Path:
    """Write it to the first of one's own catalogue folders, in place of an earlier one; this process sees it at once."""
    import yaml

    path = library.own_folders()[0] / _OWN_FOLDER / _file_name(cluster)
    path.parent.mkdir(parents=True, exist_ok=True)
    fields = {key: value for key, value in dataclasses.asdict(profile.gpu).items() if value is not None}
    if profile.network is not None:
        fields["network"] = dataclasses.asdict(profile.network)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    header = f"# Measured by hp-tool calibrate --cluster {_slug(cluster)}; measure again rather than edit.\n"
    temporary.write_text(header + yaml.safe_dump(fields, sort_keys=False, width=120))
    temporary.replace(path)
    _read_machine.cache_clear()
    return path


def gpu_constants(fields: Mapping[str, Any], *, origin: Path) -> GpuEfficiency:
    """A GPU's constants as a file writes them."""
    parts: dict[str, Any] = {}
    for key in ("attention", "decode_attention"):
        if key in fields:
            parts[key] = records.build(Roofline, fields[key], field=key, origin=origin)
    for key in ("nvlink", "all_to_all", "small_all_reduce"):
        if key in fields:
            parts[key] = records.build(Link, fields[key], field=key, origin=origin)
    for key in ("matmul", "thin_matmul"):
        if key in fields:
            parts[key] = {p: records.build(Roofline, roof, field=key, origin=origin) for p, roof in fields[key].items()}
    return GpuEfficiency(**{**fields, **parts})


@functools.lru_cache(maxsize=1024)
def _read_machine(name: str, folders: tuple[Path, ...]) -> MachineProfile | None:
    path = next((found for folder in folders if (found := folder / _OWN_FOLDER / name).is_file()), None)
    if path is None:
        return None
    fields = documents.read(path)
    network = fields.pop("network", None)
    link = None if network is None else records.build(Link, network, field="network", origin=path)
    return MachineProfile(gpu=gpu_constants(fields, origin=path), network=link)


@functools.lru_cache(maxsize=1024)
def _file_name(cluster: str) -> str:
    return f"{_slug(cluster)}.yaml"


def _slug(cluster: str) -> str:
    """A name that is a file's name anywhere and holds no path."""
    return re.sub(r"[^a-z0-9]+", "-", cluster.casefold()).strip("-")[:100] or "unnamed"


library.on_change(_read_machine.cache_clear)

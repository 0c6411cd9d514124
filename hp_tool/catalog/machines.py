"""Efficiency profiles of one's own clusters, measured by `hp-tool calibrate --cluster`: one file each, by its name."""

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
from hp_tool.domain.efficiency import GpuEfficiency, Link, Roofline

_FOLDER = "efficiency"


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineProfile:
    """What was measured on one cluster."""

    gpu: GpuEfficiency
    network: Link | None = None
    """Ring collectives across nodes; None: not measured, the framework's stand."""


def machine_profile(cluster: str) -> MachineProfile | None:
    """The profile of the cluster called so; None where nobody measured it."""
    return _read(_file_name(cluster), library.own_folders())


def save_machine_profile(cluster: str, profile: MachineProfile) -> Path:
    """Write it to the first of one's own catalogue folders, in place of an earlier one; this process sees it at once."""
    import yaml

    path = library.own_folders()[0] / _FOLDER / _file_name(cluster)
    path.parent.mkdir(parents=True, exist_ok=True)
    fields = {key: value for key, value in dataclasses.asdict(profile.gpu).items() if value is not None}
    if profile.network is not None:
        fields["network"] = dataclasses.asdict(profile.network)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    header = f"# Measured by hp-tool calibrate --cluster {_slug(cluster)}; measure again rather than edit.\n"
    temporary.write_text(header + yaml.safe_dump(fields, sort_keys=False, width=120))
    temporary.replace(path)
    _read.cache_clear()
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
def _read(name: str, folders: tuple[Path, ...]) -> MachineProfile | None:
    path = next((found for folder in folders if (found := folder / _FOLDER / name).is_file()), None)
    if path is None:
        return None
    fields = documents.parse(documents.read_text(path), origin=path)
    network = fields.pop("network", None)
    link = None if network is None else records.build(Link, network, field="network", origin=path)
    return MachineProfile(gpu=gpu_constants(fields, origin=path), network=link)


@functools.lru_cache(maxsize=1024)
def _file_name(cluster: str) -> str:
    return f"{_slug(cluster)}.yaml"


def _slug(cluster: str) -> str:
    """A name that is a file's name anywhere and holds no path."""
    return re.sub(r"[^a-z0-9]+", "-", cluster.casefold()).strip("-")[:100] or "unnamed"


library.on_change(_read.cache_clear)

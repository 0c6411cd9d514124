"""Efficiency profiles of inference engines: one file per engine and version, fitted like the GPUs' and frameworks'."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path

from hp_tool import documents
from hp_tool.catalog import records
from hp_tool.domain.serving import EngineEfficiency
from hp_tool.errors import UnsupportedError

FOLDER = Path(__file__).parent / "data" / "efficiency" / "engines"


def engine_efficiency(*, engine: str, version: str | None) -> EngineEfficiency:
    """The profile of this version; without one that of the newest version measured, marked `measured: false` where a version
    was named. UnsupportedError for an engine without any profile.
    """
    known = engine_profiles()
    versions = sorted((profile for profile in known if profile.engine == engine), key=lambda p: version_key(p.version))
    if not versions:
        names = ", ".join(dict.fromkeys(profile.engine for profile in known))
        raise UnsupportedError(f"no efficiency profile for engine {engine!r}; known: {names}", field="inference.engine")
    if version is None:
        return versions[-1]
    exact = next((profile for profile in versions if profile.version == version), None)
    if exact is not None:
        return exact
    earlier = [profile for profile in versions if version_key(profile.version) <= version_key(version)]
    return dataclasses.replace(earlier[-1] if earlier else versions[0], measured=False)


@functools.cache
def engine_profiles() -> tuple[EngineEfficiency, ...]:
    """Every profile there is, by engine and version."""
    found = []
    for path in sorted(FOLDER.glob("*.yaml")):
        fields = documents.read(path)
        found.append(records.build(EngineEfficiency, fields, field="engine", origin=path))
    return tuple(found)


def version_key(version: str) -> tuple[tuple[int, str], ...]:
    """Orders `0.5.6.post2` after `0.5.1.post1` and `1.0.0rc3` before `1.2.0rc6`: runs of digits compare as numbers."""
    parts: list[tuple[int, str]] = []
    for part in version.replace("-", ".").split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        parts.append((int(digits[:18] or 0), part[len(digits) :] or "~"))  # "~": a release follows its candidates
    return tuple(parts)

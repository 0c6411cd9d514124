"""Efficiency profiles: fitted constants of GPU dies, frameworks, engines and clusters."""

import dataclasses
import functools
import math
import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from hp_tool.catalog import documents, hardware, library, records
from hp_tool.catalog.familiarity import measured_runs
from hp_tool.cost.host import without_host
from hp_tool.cost.overlap import with_overlap
from hp_tool.cost.roofline import at_sustained_clocks, below_16_bits, with_attention_kernel
from hp_tool.domain.efficiency import (
    Clocks,
    Doubts,
    EfficiencyProfile,
    ExpertKernel,
    FrameworkEfficiency,
    GpuEfficiency,
    Link,
)
from hp_tool.domain.engines import (
    ISOLATED_EXPERTS,
    ROCM_SILICON,
    DefaultsEfficiency,
    EngineEfficiency,
    ExpertEfficiency,
    PoolEfficiency,
)
from hp_tool.domain.frameworks import SAME_CODE, STAND_INS, calls_flash_attention
from hp_tool.domain.hardware import ClusterQuery, GpuSpec, Precision
from hp_tool.domain.workload import OverlapSpec
from hp_tool.errors import InputError, UnsupportedError

FOLDER = Path(__file__).parent / "data" / "efficiency"
STAND_IN_LOG_SD, STAND_IN_MEMORY_LOG_SD = 0.25, 0.15
"""Assumed standard deviations for a framework without constants: of the log ratio of two step
times, and of log memory.

`Doubts.trainer_log_sd` is the additional deviation of step times.
"""
_GENERIC = "generic"
"""Name of the profile with typical constants, for dies without measurements."""
P = TypeVar(
    "P",
    GpuEfficiency,
    Clocks,
    Doubts,
    FrameworkEfficiency,
    EngineEfficiency,
    DefaultsEfficiency,
    ExpertEfficiency,
    PoolEfficiency,
)


def efficiency_profile(
    *,
    gpu: GpuSpec,
    framework: str,
    overlap: OverlapSpec | None = None,
    cuda_graphs: bool = False,
    cuda_graph_modules: tuple[str, ...] | None = None,
    narrow: bool = False,
    attention_kernel: str | None = None,
    cluster: str | None = None,
) -> EfficiencyProfile:
    """Return the constants of a GPU and a framework.

    Generic constants are marked `measured: false`. If `hp-tool calibrate --cluster` measured
    `cluster`, the measured constants replace those of its GPU.

    Raises:
        UnsupportedError: The framework has no profile, or an overlap or attention kernel was never
            measured.
    """
    constants = framework_constants(framework, _die_name(gpu))
    timed = gpu_efficiency(gpu).attention_kernels
    default_kernel = None
    if calls_flash_attention(framework):
        default_kernel = next((name for name in ("fa2", "cudnn") if name in timed), None)
    if kernel := attention_kernel or default_kernel:
        constants = with_attention_kernel(constants, name=kernel, timed=timed)
    if overlap is not None:
        constants = with_overlap(
            constants, overlap=overlap, newest=framework_constants(framework, "default")
        )
    if cuda_graphs:
        constants = without_host(constants, modules=cuda_graph_modules)
    if narrow:
        constants = below_16_bits(constants)
    machine = machine_profile(cluster) if cluster is not None else None
    if machine is None or machine.gpu.gpu != gpu.name:
        kernels = _sustained_constants(
            _die_name(gpu), gpu.power_w, tuple(gpu.peak_flops_per_second.items())
        )
        return EfficiencyProfile(
            gpu=kernels,
            framework=constants,
            doubts=prediction_doubts(),
            index=measured_runs("training"),
        )
    network = machine.network or constants.network
    kernels = sustained_efficiency(machine.gpu, gpu=gpu, clocks=usual_clocks(gpu))
    return EfficiencyProfile(
        gpu=kernels,
        framework=dataclasses.replace(constants, network=network),
        doubts=prediction_doubts(),
        index=measured_runs("training"),
    )


@functools.cache
def prediction_doubts() -> Doubts:
    """Return the uncertainties that are added to the deviations of a framework's fitted runs."""
    return _build(Doubts, FOLDER / "doubts.yaml")


def sustained_efficiency(kernels: GpuEfficiency, *, gpu: GpuSpec, clocks: Clocks) -> GpuEfficiency:
    """Return the kernel constants at the clocks that the GPU sustains in a long training run."""
    return _with_clocks(kernels, clocks, gpu.power_w, gpu.peak_flops_per_second)


def usual_clocks(gpu: GpuSpec) -> Clocks:
    """Return the clocks of the GPU's die; typical clocks if they were not measured."""
    return _clocks(_die_name(gpu))


def check_power_cap(query: str | ClusterQuery, *, gpu: GpuSpec, serves: bool = False) -> None:
    """Check that the effect of the query's power cap on GPU clocks is known.

    Raises:
        UnsupportedError: The effect is not known.
    """
    if isinstance(query, str) or query.power_cap_w is None:
        return
    if serves or usual_clocks(gpu).gpu is None:
        why = (
            "serving, where its effect on the clocks is unknown"
            if serves
            else f"{gpu.name}, whose clocks under a power cap were not measured"
        )
        raise UnsupportedError(
            f"power_cap_w is not supported for {why}; remove it",
            field="cluster.power_cap_w",
        )


@functools.lru_cache(maxsize=256)
def _sustained_constants(
    die: str, power_w: float, peaks: tuple[tuple[Precision, float], ...]
) -> GpuEfficiency:
    return _with_clocks(_die_efficiency(die), _clocks(die), power_w, dict(peaks))


def _with_clocks(
    kernels: GpuEfficiency, clocks: Clocks, power_w: float, peaks: Mapping[Precision, float]
) -> GpuEfficiency:
    reference = _reference(clocks.gpu) if clocks.gpu is not None else None
    return at_sustained_clocks(
        kernels, clocks=clocks, power_w=power_w, peaks=peaks, reference=reference
    )


_reference = functools.lru_cache(maxsize=64)(hardware.gpu)
library.on_change(_reference.cache_clear)
library.on_change(_sustained_constants.cache_clear)


@functools.lru_cache(maxsize=64)
def _clocks(die: str) -> Clocks:
    profiles = _profiles(FOLDER / "clocks")
    return _build(Clocks, profiles.get(die, profiles[_GENERIC]))


def frameworks() -> list[str]:
    """Return the frameworks that have a profile."""
    return sorted(path.parent.name for path in (FOLDER / "frameworks").glob("*/default.yaml"))


def gpu_efficiency(gpu: GpuSpec) -> GpuEfficiency:
    """Return the kernel constants of this GPU's die.

    A GPU whose die is unknown gets generic constants, which are marked `measured: false`.
    """
    return _die_efficiency(_die_name(gpu))


def _die_name(gpu: GpuSpec) -> str:
    return gpu.silicon or (_GENERIC if gpu.kind == "gpu" else "cpu")


@functools.lru_cache(maxsize=256)
def _die_efficiency(name: str) -> GpuEfficiency:
    profiles = _profiles(FOLDER / "silicon")
    if name not in profiles:
        hint = records.nearest(name, profiles) or f"; known: {', '.join(sorted(profiles))}"
        raise InputError(
            f"unknown silicon {name[:100]!r}{hint}; remove it to use typical constants",
            field="cluster.gpu.silicon",
        )
    return _build(GpuEfficiency, profiles[name])


@functools.lru_cache(maxsize=256)
def framework_constants(name: str, silicon: str) -> FrameworkEfficiency:
    """Return the framework's constants on this die, or its default constants if there are none for
    the die.
    """
    if name in STAND_INS:
        return _as_stand_in(framework_constants(STAND_INS[name].constants, silicon), name=name)
    if name in SAME_CODE:
        return dataclasses.replace(framework_constants(SAME_CODE[name], silicon), framework=name)
    if name not in frameworks():
        names = ", ".join((*frameworks(), *SAME_CODE, *STAND_INS))
        raise UnsupportedError(
            f"no efficiency profile for framework {name!r}; known: {names}",
            field="training.framework",
        )
    profiles = _profiles(FOLDER / "frameworks" / name)
    return _build(FrameworkEfficiency, profiles.get(silicon, profiles["default"]))


def _as_stand_in(constants: FrameworkEfficiency, *, name: str) -> FrameworkEfficiency:
    """Return the constants adapted for another framework (`name`), with larger deviations."""

    def wider(log_sd: float | None, doubt: float) -> float | None:
        return None if log_sd is None else math.hypot(log_sd, doubt)

    return dataclasses.replace(
        constants,
        stands_for=name,
        memory_log_sd=math.hypot(constants.memory_log_sd, STAND_IN_MEMORY_LOG_SD),
        reserved_log_sd=wider(constants.reserved_log_sd, STAND_IN_MEMORY_LOG_SD),
        pair_log_sd=wider(constants.pair_log_sd, STAND_IN_LOG_SD),
        expert_pair_log_sd=wider(constants.expert_pair_log_sd, STAND_IN_LOG_SD),
        fitted_on=f"assumed for {name}: the constants of {constants.framework} "
        f"({constants.fitted_on})",
    )


def _build(kind: type[P], path: Path) -> P:
    return records.build(kind, documents.read(path), field="efficiency", origin=path)


@functools.cache
def _profiles(folder: Path) -> dict[str, Path]:
    """Return the files of a folder, by profile name.

    Names from queries are looked up in this mapping, so they never become part of a path.
    """
    return {path.stem: path for path in folder.glob("*.yaml")}


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineProfile:
    """Measured constants of one cluster."""

    gpu: GpuEfficiency
    network: Link | None = None
    """Constants of ring collectives across nodes. None: those of the framework apply."""


def machine_profile(cluster: str) -> MachineProfile | None:
    """Return the measured constants of the named cluster; None if it was not measured."""
    return _read_machine_profile(f"{_file_name(cluster)}.yaml", library.user_folders())


def save_machine_profile(cluster: str, profile: MachineProfile) -> Path:
    """Write the profile to the user's first catalogue folder. It replaces an earlier profile.

    This process uses the new profile immediately. Fields with default values are omitted, because
    an earlier release of hp_tool on the same host rejects unknown fields.
    """
    import yaml

    path = library.user_folders()[0] / FOLDER.name / f"{_file_name(cluster)}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    fields = _without_defaults(profile.gpu)
    if profile.network is not None:
        fields["network"] = _without_defaults(profile.network)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    header = (
        f"# Measured by hp-tool calibrate --cluster {_file_name(cluster)}; measure again rather "
        "than edit.\n"
    )
    temporary.write_text(header + yaml.safe_dump(fields, sort_keys=False, width=120))
    temporary.replace(path)
    _read_machine_profile.cache_clear()
    return path


def _without_defaults(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_defaults(each) for key, each in value.items()}
    if not dataclasses.is_dataclass(value):
        return value
    mapping = {}
    for field in dataclasses.fields(value):
        factory = field.default_factory
        default = field.default if factory is dataclasses.MISSING else factory()
        current = getattr(value, field.name)
        if current != default:
            mapping[field.name] = _without_defaults(current)
    return mapping


@functools.lru_cache(maxsize=1024)
def _read_machine_profile(name: str, folders: tuple[Path, ...]) -> MachineProfile | None:
    path = next(
        (file for folder in folders if (file := folder / FOLDER.name / name).is_file()), None
    )
    if path is None:
        return None
    fields = documents.read(path)
    parts = {"network": fields.pop("network", None), "gpu": fields}
    return records.build(MachineProfile, parts, field="efficiency", origin=path)


@functools.lru_cache(maxsize=1024)
def _file_name(cluster: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", cluster.casefold()).strip("-")[:100] or "unnamed"


library.on_change(_read_machine_profile.cache_clear)


def engine_efficiency(
    *, engine: str, version: str | None, silicon: str | None = None
) -> EngineEfficiency:
    """Return the profile of an engine version.

    A version without a profile uses the newest earlier profile, preferably one with runs on this
    die (`silicon`), marked `measured: false`. If no version is given, the newest profile with
    measured runs is used, preferably one with runs on this die. A profile that was fitted only to
    kernel timings applies only if its version or a later one is requested.

    Raises:
        UnsupportedError: The engine has no profile.
    """
    all_profiles = engine_profiles()
    versions = sorted(
        (
            p
            for p in all_profiles
            if p.engine == engine
            and (not p.kernels_alone or _is_release_or_later(version, p.version))
        ),
        key=lambda p: version_key(p.version),
    )
    if not versions:
        names = ", ".join(dict.fromkeys(profile.engine for profile in all_profiles))
        raise UnsupportedError(
            f"no efficiency profile for engine {engine!r}; known: {names}", field="inference.engine"
        )
    on_this_die = [profile for profile in versions if silicon in profile.fitted_silicon] or versions
    if version is None:
        return on_this_die[-1]
    nearest = _nearest_profile(versions, version)
    if version_key(version) == version_key(nearest.version):
        return nearest
    constants = nearest if nearest in on_this_die else _nearest_profile(on_this_die, version)
    settings = {name: getattr(nearest, name) for name in SETTINGS_OF_A_RELEASE}
    return dataclasses.replace(constants, **settings, measured=False)


SETTINGS_OF_A_RELEASE = (
    "max_num_seqs",
    "max_num_batched_tokens",
    "memory_fraction",
    "memory_fraction_of",
    "reserve_bytes",
    "communicator_bytes",
    "multicast_bytes",
    "sampler_bytes_per_logit",
    "working_set",
    "reserve_doubt_bytes",
    "kv_reserved_output_fraction",
    "fp8_cache_with",
    "fp8_scales",
)
"""Profile fields that are always taken from the nearest release, even if the fitted constants come
from another release.
"""


def _is_release_or_later(version: str | None, release: str) -> bool:
    return version is not None and version_key(version) >= version_key(release)


def _nearest_profile(versions: list[EngineEfficiency], version: str) -> EngineEfficiency:
    """Return the newest profile that is not newer than `version`; if there is none, the oldest
    profile.
    """
    earlier = [each for each in versions if version_key(each.version) <= version_key(version)]
    return earlier[-1] if earlier else versions[0]


@functools.cache
def expert_efficiency(*, engine: str) -> ExpertEfficiency:
    """Return an engine's overheads of MoE layers, fitted to its own runs. If it has no runs, return
    those fitted to the runs of all engines.

    `megatron-core`, whose expert kernels were timed in isolation, has no overheads.
    """
    if engine == "megatron-core":
        return ISOLATED_EXPERTS
    path = FOLDER / "experts" / f"{engine}.yaml"
    return _build(ExpertEfficiency, path if path.is_file() else FOLDER / "experts.yaml")


@functools.cache
def defaults_efficiency(*, engine: str, silicon: str | None) -> DefaultsEfficiency:
    """Return the overheads of an engine with default settings on a die, fitted to its own runs. If
    it has no runs, or with ROCm, return those fitted to the runs of all engines.
    """
    path = FOLDER / "defaults" / f"{engine}.yaml"
    has_own_fit = path.is_file() and silicon not in ROCM_SILICON
    return _build(DefaultsEfficiency, path if has_own_fit else FOLDER / "defaults.yaml")


@functools.cache
def pool_efficiency() -> PoolEfficiency:
    """Return the overheads of separate prefill and decode pools."""
    return _build(PoolEfficiency, FOLDER / "pools.yaml")


@functools.cache
def engine_profiles() -> tuple[EngineEfficiency, ...]:
    """Return the profiles of all engines, ordered by engine and version."""
    return tuple(
        _build(EngineEfficiency, path) for path in sorted((FOLDER / "engines").glob("*.yaml"))
    )


def version_key(version: str) -> tuple[tuple[int, str], ...]:
    """Return a sort key for versions that compares groups of digits as numbers.

    `0.5.6.post2` follows `0.5.1.post1`. `1.0.0rc3` precedes `1.2.0rc6` and `1.0`, which equals
    `1.0.0`.
    """
    parts: list[tuple[int, str]] = []
    for part in version.removeprefix("v").replace("-", ".").split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        # "~": a release follows its release candidates.
        parts.append((int(digits[:18] or 0), part[len(digits) :] or "~"))
    parts += [(0, "~")] * (3 - len(parts))
    return tuple(parts)


STAND_IN = "vllm"
"""Engine whose kernels stand in for weight formats that were not timed in another engine. vLLM and
SGLang share most kernels.
"""


def expert_kernels(gpu: GpuEfficiency, *, engine: str, version: str) -> dict[str, ExpertKernel]:
    """Return an engine's expert kernels, by weight format. Each kernel is from the release nearest
    to `version` that was timed on the GPU's die.
    """
    timed = gpu.grouped_matmul or {}
    kernels: dict[str, ExpertKernel] = {}
    for name in (STAND_IN, engine):
        releases = timed.get(name, {})
        for release in reversed(_nearest_first(releases, version)):
            kernels |= releases[release]
    return kernels


def _nearest_first(releases: Collection[str], version: str) -> list[str]:
    """Return the releases up to `version`, newest first, followed by the later ones, oldest
    first.
    """
    ordered = sorted(releases, key=version_key)
    earlier = [release for release in ordered if version_key(release) <= version_key(version)]
    return earlier[::-1] + ordered[len(earlier) :]

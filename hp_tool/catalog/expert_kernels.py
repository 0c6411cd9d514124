"""Choose the kernels of routed experts for an engine's release among those timed on a die."""

from collections.abc import Collection

from hp_tool.catalog.efficiency import version_key
from hp_tool.domain.efficiency import ExpertKernel, GpuEfficiency

STAND_IN = "vllm"
"""Engine whose kernels are used for weight formats not timed in an engine: vLLM and SGLang share
most of them.
"""


def expert_kernels(gpu: GpuEfficiency, *, engine: str, version: str) -> dict[str, ExpertKernel]:
    """Return an engine's kernels by weight format, each from the release timed on the die nearest
    to `version`.
    """
    timed = gpu.grouped_matmul or {}
    kernels: dict[str, ExpertKernel] = {}
    for name in (STAND_IN, engine):
        releases = timed.get(name, {})
        for release in reversed(_nearest_first(releases, version)):
            kernels |= releases[release]
    return kernels


def _nearest_first(releases: Collection[str], version: str) -> list[str]:
    """Return the releases in order: up to `version` from the newest, then later ones from the
    oldest.
    """
    ordered = sorted(releases, key=version_key)
    earlier = [release for release in ordered if version_key(release) <= version_key(version)]
    return earlier[::-1] + ordered[len(earlier) :]

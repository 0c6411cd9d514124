"""What a framework's release changes: how tokens reach experts by default, how fast steps are, how
far predictions scatter.
"""

from __future__ import annotations

import math

from hp_tool.catalog.efficiency import efficiency
from hp_tool.domain.efficiency import EfficiencyProfile, FrameworkEfficiency
from hp_tool.domain.hardware import GpuSpec
from hp_tool.domain.parallel import TokenDispatcher
from hp_tool.domain.releases import (
    FIRST_CONTAINER,
    FLEX_IS_USUAL,
    LATEST,
    has_come,
    release_numbers,
)

MOST_YEARS_AHEAD, MOST_YEARS_BACK = 1.0, 4.0
"""How far the trend of releases is carried: as far back as there are runs of today's frameworks,
and a year ahead of them.
"""


def usual_dispatcher(framework_version: str | None) -> TokenDispatcher:
    """flex from the releases of FLEX_IS_USUAL on; alltoall, which runs everywhere, before them and
    for unknown releases.
    """
    return "flex" if has_come(framework_version or "", since=FLEX_IS_USUAL) else "alltoall"


def release_factor(framework: FrameworkEfficiency, release: str | None) -> float:
    """Return the step time under a release of the framework over that under the newest release of
    its measured runs.

    The trend of today's releases gives it. Constants of one software (2022's, on A100) carry the
    trend back in time alone: none of their runs is newer. 1 for releases that no query names, and
    for Megatron Core's own versions, which have no date.
    """
    if not framework.yearly_gain or framework.newest_release is None or release is None:
        return 1.0
    numbers, newest = (release_numbers(one) for one in (release, framework.newest_release))
    if len(numbers) < 2 or numbers[0] < FIRST_CONTAINER:
        return 1.0
    years = newest[0] - numbers[0] + (newest[1] - numbers[1]) / 12.0
    ahead = MOST_YEARS_AHEAD if framework.newest_release >= LATEST else 0.0
    return math.exp(framework.yearly_gain * min(max(years, -ahead), MOST_YEARS_BACK))


def release_variance(
    profile: EfficiencyProfile, *, experts: bool, gpu: GpuSpec, release: str | None
) -> float:
    """Return what a model's experts and its framework's release add to the variance of ln(measured
    / predicted step time).
    """
    constants, more = profile.framework, 0.0
    if experts and constants.expert_time_log_sd is None:
        # No run of the framework had experts: they scatter as Megatron Core's of all releases do.
        measured = efficiency(gpu=gpu, framework="megatron-core").framework
        more += (measured.expert_time_log_sd or 0.0) ** 2 + (
            measured.earlier_expert_time_log_sd or 0.0
        ) ** 2
    elif experts:
        earlier = (
            constants.earlier_expert_time_log_sd if usual_dispatcher(release) != "flex" else None
        )
        more += (constants.expert_time_log_sd or 0.0) ** 2 + (earlier or 0.0) ** 2
    return more + unsaid_release_variance(profile, experts=experts, release=release)


def unsaid_release_variance(
    profile: EfficiencyProfile, *, experts: bool, release: str | None
) -> float:
    """Return what of it a release that nobody named adds: all runs of one machine have it in
    common.
    """
    constants = profile.framework
    several = (
        constants.newest_release is not None and constants.newest_release >= LATEST
    )  # others are one software's
    unsaid = several and release is None and not experts and constants.stands_for is None
    return profile.doubts.unsaid_release_log_sd**2 if unsaid else 0.0

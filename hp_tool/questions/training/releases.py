"""Effects of a framework release on the default dispatcher, the step time and its uncertainty."""

from __future__ import annotations

import math

from hp_tool.catalog.efficiency import efficiency_profile
from hp_tool.domain.efficiency import EfficiencyProfile, FrameworkEfficiency
from hp_tool.domain.hardware import GpuSpec
from hp_tool.domain.parallel import TokenDispatcher
from hp_tool.domain.releases import (
    FIRST_CONTAINER,
    FLEX_IS_DEFAULT,
    LATEST,
    is_at_least,
    release_numbers,
)

MOST_YEARS_AHEAD, MOST_YEARS_BACK = 1.0, 4.0
"""Limits for extrapolating the release trend, in years: one year ahead, and back as far as
measurements of current frameworks reach.
"""


def default_dispatcher(framework_version: str | None) -> TokenDispatcher:
    """Return the default dispatcher of a release: flex from FLEX_IS_DEFAULT on, else alltoall,
    which all releases support.
    """
    return "flex" if is_at_least(framework_version or "", since=FLEX_IS_DEFAULT) else "alltoall"


def release_factor(framework: FrameworkEfficiency, release: str | None) -> float:
    """Return the step time with a release divided by that with the newest measured release.

    The ratio follows the trend of recent releases. For constants measured with a single software
    version (of 2022, on A100), the trend applies only to earlier releases. The ratio is 1 without a
    release, and for Megatron Core version numbers, which have no date.
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
    """Return the variance that experts and the release add to ln(measured / predicted step
    time).
    """
    constants, variance = profile.framework, 0.0
    if experts and constants.expert_time_log_sd is None:
        # No run of the framework had experts, so use the deviation of Megatron Core's runs of all
        # releases.
        measured = efficiency_profile(gpu=gpu, framework="megatron-core").framework
        variance += (measured.expert_time_log_sd or 0.0) ** 2 + (
            measured.earlier_expert_time_log_sd or 0.0
        ) ** 2
    elif experts:
        earlier = (
            constants.earlier_expert_time_log_sd if default_dispatcher(release) != "flex" else None
        )
        variance += (constants.expert_time_log_sd or 0.0) ** 2 + (earlier or 0.0) ** 2
    return variance + unnamed_release_variance(profile, experts=experts, release=release)


def unnamed_release_variance(
    profile: EfficiencyProfile, *, experts: bool, release: str | None
) -> float:
    """Return the part of `release_variance` that is due to an omitted release; 0 if the query names
    one. It is common to all runs on one machine.
    """
    constants = profile.framework
    has_several_releases = (
        constants.newest_release is not None and constants.newest_release >= LATEST
    )  # Other constants were measured with a single software version.
    applies = (
        has_several_releases and release is None and not experts and constants.stands_for is None
    )
    return profile.doubts.unsaid_release_log_sd**2 if applies else 0.0

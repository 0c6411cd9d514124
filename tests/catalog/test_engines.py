"""Engine profiles: they load, stay physical, and the nearest version answers for one that nobody
measured.
"""

from __future__ import annotations

import pytest

from hp_tool.catalog.efficiency import engine_efficiency, engine_profiles, version_key
from hp_tool.errors import UnsupportedError


def test_every_shipped_profile_is_physical_and_says_what_it_was_fitted_on() -> None:
    profiles = engine_profiles()
    assert {profile.engine for profile in profiles} == {"vllm", "sglang", "trtllm", "megatron-core"}
    for profile in profiles:
        assert 0.7 <= profile.matmul_slowdown <= 2.0 and 0.5 <= profile.attention_slowdown <= 4.0
        assert 0.0 <= profile.iteration_overhead_s < 0.02 and 0.0 < profile.memory_fraction < 1.0
        fit = "--only releases" if profile.kernels_alone else "--only engines"
        assert profile.tpot_log_sd > 0.0 and (fit in profile.fitted_on) == profile.measured


def test_versions_order_as_their_makers_count() -> None:
    ordered = [
        "0.5.1.post1",
        "0.5.6.post2",
        "0.5.8.post1",
        "0.12.0",
        "1.0.0rc3",
        "1.0",
        "1.2.0rc6.post1",
        "1.10.0",
    ]
    assert sorted({*ordered}, key=version_key) == ordered


def test_the_newest_version_is_the_default_and_an_unknown_one_takes_the_nearest_before() -> None:
    assert engine_efficiency(engine="sglang", version=None).version == "0.5.6.post2"
    between = engine_efficiency(engine="sglang", version="0.5.4")
    assert (between.version, between.measured) == ("0.5.1.post1", False)
    older = engine_efficiency(engine="sglang", version="0.1")
    assert (older.version, older.measured) == ("0.5.1.post1", False)
    assert engine_efficiency(engine="vllm", version="0.12.0").measured


def test_an_engine_without_a_profile_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match="known: megatron-core, sglang, trtllm, vllm"):
        engine_efficiency(engine="tgi", version=None)


@pytest.mark.parametrize(
    ("engine", "version"), [("vllm", "0.24.0"), ("sglang", "0.5.16"), ("trtllm", "1.3")]
)
def test_a_profile_of_kernels_alone_is_for_who_names_its_release_or_a_later_one(
    engine: str, version: str
) -> None:
    own = engine_efficiency(engine=engine, version=version, silicon="h100")
    assert own.kernels_alone and own.version == version
    later = engine_efficiency(engine=engine, version=f"{version}9", silicon="h100")
    assert later.kernels_alone and not later.measured
    for silicon in ("h100", "b200", "a100", None):
        assert not engine_efficiency(engine=engine, version=None, silicon=silicon).kernels_alone
    measured = engine_efficiency(engine=engine, version=None, silicon="h100")
    assert own.tpot_log_sd > measured.tpot_log_sd
    assert not engine_efficiency(
        engine=engine, version=measured.version, silicon="b200"
    ).kernels_alone

"""Published training and serving of large mixtures of experts, on which nothing was fitted."""

from __future__ import annotations

from benchmarks.accuracy import published


def test_they_hold_and_name_what_they_assume() -> None:
    found = published.evaluate()
    assert len(found) == 5
    for one in found:
        assert one.within and one.feasible, one
        assert one.source and one.assumed
    deepseek = found[0]
    assert deepseek.factor is not None and deepseek.factor <= 1.27
    assert "Et*4|(t*4|)*14tmL" in deepseek.assumed, "61 layers over 16 stages"
    assert deepseek.published == 1543.0

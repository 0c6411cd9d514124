"""When a run ends before its last step; `test_agreement.py` runs one."""

from __future__ import annotations

import pytest

from tests.profiler.requests import request


@pytest.mark.components
@pytest.mark.parametrize(
    ("times", "limits", "words"),
    [
        ((9.0, 1.0, 1.0, 1.0, 1.0), {"step_tolerance_fraction": 0.01}, "all are within 0.00%"),
        (
            (9.0, 1.0, 1.0, 1.0),
            {"step_tolerance_fraction": 0.01},
            None,
        ),  # three do not hold the median safely enough
        ((9.0, 1.0, 1.0, 1.02, 1.0), {"step_tolerance_fraction": 0.01}, None),
        ((9.0, 1.0, 1.0, 1.0, 1.0), {}, None),
        ((9.0,), {"longest_step_s": 2.0}, None),  # the warm-up says nothing
        ((1.0, 2.5), {"longest_step_s": 2.0}, "is above the limit of 2 s"),
        ((1.0, 2.5, 1.9), {"longest_step_s": 2.0}, None),
        ((1.0, *(2.5,) * 20), {"longest_step_s": 2.0}, None),  # all steps ran: nothing was stopped
    ],
)
def test_when_steps_are_enough(times, limits, words):
    pytest.importorskip("torch")
    from hp_tool.cluster.profiler.steps import why_stop

    told = why_stop(request(steps=20, warmup_steps=1, **limits), times)
    assert (told is None) if words is None else (words in told)

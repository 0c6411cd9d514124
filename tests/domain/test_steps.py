"""Which steps of a run count, and what a run that was cut off has left of them."""

from __future__ import annotations

import pytest

from hp_tool.domain.steps import WARMUP_EXTENSION, count_warmup_steps, format_step, read_steps


@pytest.mark.parametrize(
    ("times_s", "least", "warmup"),
    [
        ((9.0, 1.0, 1.0, 1.0), 1, 1),
        ((9.0, 5.0, 2.0, 1.0, 1.0), 1, 3),  # each was still faster than the one before
        ((9.0, 5.0, 2.0, 1.0), 1, 3),
        ((9.0, 1.0, 1.3, 1.0), 1, 1),  # noise after the first that did not become faster is noise
        ((64.0, 32.0, 16.0, 8.0, 4.0, 2.0, 1.0), 1, 5),  # at most four more
        ((9.0, 1.0), 0, 0),  # nothing was to be warmed up
        ((9.0,), 2, 2),
    ],
)
def test_warm_up_lasts_until_steps_no_longer_become_faster(
    times_s: tuple[float, ...], least: int, warmup: int
) -> None:
    most = least + WARMUP_EXTENSION if least else 0
    assert count_warmup_steps(times_s, least=least, most=most) == warmup
    assert count_warmup_steps(times_s, least=least, most=least) == least
    for count in range(len(times_s)):  # a step that counted once counts on
        assert count_warmup_steps(times_s[:count], least=least, most=most) <= warmup


def test_steps_are_read_back_from_a_log_that_breaks_off() -> None:
    lines = [
        format_step(n, warmup=(1, 5), time_s=t, loss=5.5 - n, norm=1.0)
        for n, t in ((1, 9.0), (2, 1.25), (3, 1.5))
    ]
    log = "NCCL says\n" + "\n".join(lines) + "\nhp-tool step 4 (1 to 5 to wa"
    assert read_steps(log) == ((9.0,), (1.25, 1.5), (4.5, 3.5, 2.5))
    assert read_steps(f"{log}\n{lines[0]}\n{lines[1]}\n") == (
        (9.0,),
        (1.25,),
        (4.5, 3.5),
    )  # started again by the engine
    assert read_steps("step: 10 loss: 7.85 memory: 40.34GiB") == ((), (), ())

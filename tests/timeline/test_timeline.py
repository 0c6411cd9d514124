"""Recorded steps: parts that sum to the step, waits for others, and planted faults, each named
first.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hp_tool.domain.parts import COMMUNICATION, STEP_KEYS
from hp_tool.traces import read_traces
from hp_tool.traces.timeline import KINDS, Collectives, Group, Phases, RankEvents, faults, timeline
from hp_tool.traces.timeline.events import PHASES
from hp_tool.traces.timeline.split import owners, split
from tests.timeline.made import FAULTS, training, write

NEVER = -np.inf


def events(rows: list[tuple[str, float, float]], **known) -> RankEvents:
    """Kernels by (kind, start, end), launched as they start; a part of COMMUNICATION as kind is a
    collective of that part.
    """
    kinds = [KINDS.index("collective" if name in COMMUNICATION else name) for name, _, _ in rows]
    parts = [name for name, _, _ in rows if name in COMMUNICATION]
    groups = tuple(Group(part=part, ranks=(0, 1)) for part in dict.fromkeys(parts))
    start = np.array([row[1] for row in rows])
    used = Collectives(
        event=np.array(
            [n for n, row in enumerate(rows) if row[0] in COMMUNICATION], dtype=np.int64
        ),
        operation=np.zeros(len(parts), dtype=np.int64),
        group=np.array(
            [[each.part for each in groups].index(part) for part in parts], dtype=np.int64
        ),
        size_bytes=np.full(len(parts), 1e6),
    )
    columns = {
        "rank": 0,
        "start_s": start,
        "end_s": np.array([row[2] for row in rows]),
        "kind": np.array(kinds, dtype=np.int64),
        "launch_s": start,
        "thread": np.ones(len(rows), dtype=np.int64),
        "collectives": used,
        "groups": groups,
    }
    return RankEvents(**columns | known)


def test_an_instant_belongs_to_what_computes_then_to_what_is_sent_then_to_nobody() -> None:
    rows = [
        ("matmul", 0, 4),
        ("attention", 3, 6),
        ("data_parallel", 5, 9),
        ("copy_host", 8, 10),
        ("optimizer", 12, 13),
    ]
    one = events(rows, launch_s=np.array([0, 3, 5, 8, 11.5]))
    until = np.full(5, NEVER)
    until[2] = 7.0
    parts = split(one, owner=owners(one), waits_until_s=until, window_s=(0.0, 14.0))
    shown = {name: seconds for name, seconds in parts.parts_s.items() if seconds}
    assert shown == {
        "compute": 3,
        "attention": 3,
        "data_parallel": 3,
        "offload": 1,
        "optimizer": 1,
        "overhead": 3,
    }
    assert parts.hidden_s["data_parallel"] == 0.0  # the second under attention was a wait
    assert parts.waits_s["data_parallel"] == 1.0 and parts.own_s == 13.0
    assert (
        list(parts.gaps_s) == [2.0, 1.0] and parts.host_s == 2.5
    )  # the last one ends with no kernel


@given(
    st.lists(
        st.tuples(
            st.sampled_from((*KINDS[:-1], *COMMUNICATION)),
            st.floats(-1, 11),
            st.floats(0, 5),
            st.floats(-1, 6),
        ),
        max_size=12,
    )
)
def test_parts_sum_to_the_window_and_none_is_negative(rows) -> None:
    one = events([(name, start, start + length) for name, start, length, _ in rows])
    until = np.array(
        [start + wait if name in COMMUNICATION else NEVER for name, start, _, wait in rows]
    )
    parts = split(one, owner=owners(one), waits_until_s=until, window_s=(0.0, 10.0))
    assert list(parts.parts_s) == [*STEP_KEYS, "unknown"]
    assert parts.step_s == pytest.approx(10.0)
    values = [
        *parts.parts_s.values(),
        *parts.hidden_s.values(),
        *parts.waits_s.values(),
        parts.host_s,
    ]
    assert (
        min(values) >= -1e-9
        and sum(parts.waits_s.values()) <= 10.0 + 1e-9
        and parts.host_s <= 10.0 + 1e-9
    )


def test_what_a_checkpoint_runs_again_is_recomputation_and_its_backward_is_not() -> None:
    """CheckpointFunctionBackward runs forward again, then the engine's functions, one of which
    surrounds it all.
    """
    number = PHASES.index
    phases = Phases(
        phase=np.array(
            [number("backward"), number("recompute"), number("backward"), number("optimizer")]
        ),
        start_s=np.array([0.0, 0.1, 4.0, 8.0]),
        end_s=np.array([7.0, 6.9, 6.0, 9.0]),
        thread=np.array([1, 1, 1, 1]),
    )
    one = events(
        [
            ("matmul", 1, 3),
            ("attention", 3, 4),
            ("matmul", 4.5, 6),
            ("elementwise", 8.2, 8.7),
            ("matmul", 9, 10),
        ],
        phases=phases,
    )
    parts = split(
        one, owner=owners(one), waits_until_s=np.full(5, NEVER), window_s=(0.0, 10.0)
    ).parts_s
    assert (parts["recompute"], parts["compute"], parts["optimizer"]) == (
        3.0,
        2.5,
        pytest.approx(0.5),
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("traces")


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_named_first(fault: str, folder: Path) -> None:
    (folder / fault).mkdir()
    line = timeline(
        read_traces(write(training(fault=fault), folder / fault, packed=fault == "host_gap"))
    )
    first = faults(line)[0]
    culprit = {"slow_rank": 3, "host_gap": 1, "unequal_work": 0}.get(fault)
    assert (first.kind, first.rank) == (fault, culprit)
    if fault == "slow_link":
        assert (first.part, first.ranks) == (
            "tensor_parallel",
            (2, 3),
        ) and first.factor == pytest.approx(5.0, rel=0.1)
    for steps, spans in zip(line.splits, line.windows_s, strict=True):
        assert [step.step_s for step in steps] == pytest.approx(
            list(np.diff(spans)[:, 0]), rel=0.01
        )


@pytest.mark.parametrize("fault", [None, "pipeline"])
def test_nothing_is_named_where_nothing_is_wrong(fault: str | None, folder: Path) -> None:
    for seed in range(10):
        home = folder / f"clean{fault}{seed}"
        home.mkdir()
        line = timeline(read_traces(write(training(fault=fault, seed=seed), home)))
        assert faults(line) == ()


def test_clocks_of_hosts_are_brought_together_by_the_ends_of_collectives(folder: Path) -> None:
    """Each rank's clock is up to 5 ms off: without that, waits of a millisecond would be any
    number.
    """
    (folder / "clocks").mkdir()
    line = timeline(read_traces(write(training(fault="host_gap"), folder / "clocks")))
    typical = [steps[line.typical] for steps in line.splits]
    waits_us = [1e6 * sum(step.waits_s.values()) for step in typical]
    assert waits_us[1] < 50.0
    assert waits_us[0] == pytest.approx(1500.0, abs=60.0)  # rank 1's partner waits for its gap
    assert line.ranks[line.critical].rank == 1


def test_a_stage_that_waits_for_the_other_has_a_bubble(folder: Path) -> None:
    (folder / "bubble").mkdir()
    line = timeline(read_traces(write(training(fault="pipeline"), folder / "bubble")))
    second = line.splits[1][line.typical]
    assert 1e6 * second.parts_s["pipeline_bubble"] == pytest.approx(
        6 * 20.0, rel=0.2
    )  # the first micro-batch's forward
    assert 1e6 * second.parts_s["pipeline_p2p"] == pytest.approx(8 * 10.0, rel=0.2)


def test_a_slow_link_costs_only_the_seconds_that_no_computing_hides() -> None:
    """A message takes 8 s on ranks 2 and 3 and 2 s on ranks 0 and 1: 6 s longer, 4 times as long.

    It begins at 4 s and the matmul ends at 6 s: of 8 s, 2 are hidden and 6 exposed, so 6 x 6/8 =
    4.5 s would be won.
    """
    ranks = []
    for rank, group, length in (
        (0, (0, 1), 2.0),
        (1, (0, 1), 2.0),
        (2, (2, 3), 8.0),
        (3, (2, 3), 8.0),
    ):
        rows = [("matmul", 0.0, 6.0), ("tensor_parallel", 4.0, 4.0 + length)]
        groups = (Group(part="tensor_parallel", ranks=group),)
        ranks.append(
            events(rows, rank=rank, groups=groups, on_device=False, steps_s=np.array([[0.0, 14.0]]))
        )
    (slow,) = (fault for fault in faults(timeline(ranks)) if fault.kind == "slow_link")
    assert (slow.part, slow.ranks, slow.factor, slow.seconds) == (
        "tensor_parallel",
        (2, 3),
        4.0,
        pytest.approx(4.5),
    )

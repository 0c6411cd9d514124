"""The ledger fails when a recorded figure moves without a reason, and only for the groups that
moved.
"""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from benchmarks.accuracy import laws, ledger
from benchmarks.accuracy.comparison import Comparison
from benchmarks.accuracy.data import folder_named
from benchmarks.accuracy.groups import Group
from hp_tool.catalog import gpu

ROOT = Path(__file__).resolve().parents[1]
SECTIONS = ["tuning", "new dies", "memory", "serving"]
"""Sections that use the shipped constants and fit little: seconds."""
PERTURB = """
import json, shutil, sys
from pathlib import Path
import yaml
from hp_tool.catalog import efficiency
from benchmarks.accuracy import ledger

folder = Path(sys.argv[2]) / "efficiency"
shutil.copytree(efficiency.FOLDER, folder)
changed = folder / "clocks" / "b300.yaml"
fields = yaml.safe_load(changed.read_text())
fields["share"] = {name: 0.8 * value for name, value in fields["share"].items()}
changed.write_text(yaml.safe_dump(fields))
efficiency.FOLDER = folder
print(json.dumps(ledger.compute(Path(sys.argv[1]), only=json.loads(sys.argv[3]))))
"""


@pytest.fixture(scope="module")
def folder() -> Path:
    return folder_named()


def rows(*predicted: float, part: str = "h100") -> list[Comparison]:
    return [
        Comparison(
            source="s",
            model="m",
            what=f"row {i}",
            published=1.0,
            predicted=value,
            low=0.8,
            high=1.2,
            part=part,
        )
        for i, value in enumerate(predicted)
    ]


def ledger_of(*groups: Group) -> ledger.Ledger:
    return {
        "groups": {group.title: ledger.entry(group) for group in groups},
        "headlines": {},
        "laws": {},
    }


def group(title: str, *predicted: float) -> Group:
    return Group(title=title, left_out="model", saw="nothing", rows=rows(*predicted))


def test_only_the_group_that_moved_fails() -> None:
    recorded = ledger_of(group("A", 1.1, 0.9), group("B", 1.05))
    now = ledger_of(group("A", 1.1, 0.9), group("B", 1.06))
    assert ledger.failures(recorded, recorded, quick=False) == []
    assert ledger.find_moves(now, recorded).keys() == {"B", "B | h100"}
    assert ledger.find_moves(now, recorded)["B"]["mean"] == [0.05, 0.06]


def test_a_part_that_moves_fails_though_its_group_does_not() -> None:
    """One GPU becomes better and another worse by the same amount."""
    parts = [*rows(1.1, part="h100"), *rows(1.2, part="b200")]
    swapped = [*rows(1.2, part="h100"), *rows(1.1, part="b200")]
    recorded, now = (
        ledger_of(Group(title="A", left_out="model", saw="", rows=each))
        for each in (parts, swapped)
    )
    assert {"A | h100", "A | b200"} <= ledger.find_moves(now, recorded).keys()
    assert "A" not in ledger.find_moves(now, recorded)


def test_a_figure_may_move_within_its_band_in_both_directions() -> None:
    recorded = ledger_of(group("A", 1.10))
    assert not ledger.find_moves(ledger_of(group("A", 1.1015)), recorded)
    assert ledger.find_moves(
        ledger_of(group("A", 1.08)), recorded
    )  # a better figure needs a reason, too


def test_a_group_that_disappears_or_a_row_that_is_refused_fails() -> None:
    recorded = ledger_of(group("A", 1.1), group("B", 1.1))
    assert ledger.failures(ledger_of(group("A", 1.1)), recorded, quick=False) == ["not computed: B"]
    refused = Group(title="A", left_out="model", saw="", rows=[*rows(1.1), *rows(float("nan"))])
    assert ledger.find_moves(ledger_of(refused), ledger_of(group("A", 1.1, 1.1)))["A"]["n"] == [
        2,
        1,
    ]


def test_quick_runs_do_not_miss_the_long_groups() -> None:
    recorded = ledger_of(group("A", 1.1), group("B", 1.1))
    recorded["groups"]["B"]["long"] = True
    assert ledger.failures(ledger_of(group("A", 1.1)), recorded, quick=True) == []


def test_headlines_and_laws_need_a_reason() -> None:
    now = {
        "groups": {},
        "headlines": {
            "far, paper": {"predicted": 1.1, "error": 0.1},
            "near, paper": {"predicted": 1.0, "error": 0.01},
        },
        "laws": {"law": {"checked": 2, "broken": ["a on b200"]}},
    }
    assert len(ledger.unexplained_violations(now, {})) == 2
    known = {"far, paper": "cause", "law: a on": "cause", "near, paper": "cause"}
    assert ledger.unexplained_violations(now, known) == []
    assert ledger.unneeded_exceptions(now, known) == ["near, paper"]
    moved = copy.deepcopy(now)
    moved["headlines"]["near, paper"]["predicted"] = 1.02
    moved["laws"]["law"]["broken"].append("c on b200")
    assert ledger.find_moves(moved, now) == {
        "near, paper": {"predicted": [1.0, 1.02]},
        "law": {"broken": [0, ["c on b200"]]},
    }


def test_headlines_cannot_drift_again() -> None:
    """MFU of 177B on 96 and 4,608 H100 before and after commits d339ca6a and 67d83eaf; 47 and 42
    were published.
    """
    history = [(46.69, 40.40), (56.23, 49.43), (53.40, 47.02)]
    for before, after in pairwise(history):
        recorded, now = (
            {
                "groups": {},
                "laws": {},
                "headlines": {
                    f"177B on {gpus}": {"predicted": mfu, "error": 0.0} for gpus, mfu in one
                },
            }
            for one in (zip((96, 4608), before, strict=True), zip((96, 4608), after, strict=True))
        )
        assert len(ledger.failures(now, recorded, quick=True)) == 2


def test_figures_are_not_recorded_without_a_reason(tmp_path: Path) -> None:
    recorded = ledger_of(group("A", 1.1)) | {"report": {}, "points": {}}
    now = ledger_of(group("A", 1.2)) | {"report": {}, "points": {}}
    saved = ledger.updated_ledger(
        now, recorded, ledger.find_moves(now, recorded), "kernels of B200 were timed again"
    )
    ledger.save(saved, tmp_path / "ledger.json")
    read = ledger.load(tmp_path / "ledger.json")
    assert read == saved
    (move,) = read["moves"]
    assert move["reason"] == "kernels of B200 were timed again" and move["figures"]["A"][
        "mean"
    ] == [0.1, 0.2]
    assert ledger.failures(now, read, quick=False) == []


def test_a_changed_constant_of_a_die_fails_exactly_its_groups(folder: Path, tmp_path: Path) -> None:
    """The clocks of B300 change in a copy of the catalogue: only groups and parts with runs on that
    die move.
    """

    def computed(code: str, *arguments: str) -> dict[str, Any]:
        done = subprocess.run(
            [sys.executable, "-c", code, *arguments],
            capture_output=True,
            text=True,
            check=True,
            cwd=ROOT,
        )
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    now = ledger.compute(folder, only=SECTIONS)
    moved = ledger.find_moves(
        computed(PERTURB, str(folder), str(tmp_path), json.dumps(SECTIONS)), now
    )
    on_die = {
        name
        for title, entry in now["groups"].items()
        for name in (title, *(f"{title} | {part}" for part in entry["parts"]))
        if entry["unit"] == "s"
        and not title.startswith("Serving")
        and any(_is_b300(part) for part in _parts(name, entry))
    }
    assert on_die and moved.keys() == on_die


def _parts(name: str, entry: dict[str, Any]) -> list[str]:
    return [name.rpartition(" | ")[2]] if " | " in name else list(entry["parts"])


def _is_b300(part: str) -> bool:
    return part in ("b300-sxm-288gb", "gb300-nvl72") and gpu(part).silicon == "b300"


def test_what_is_recorded_holds_by_itself() -> None:
    """Every headline outside the band and every broken law is known, with a reason, and no entry is
    out of date.
    """
    recorded = ledger.load()
    assert ledger.unexplained_violations(recorded, recorded["known"]) == []
    assert ledger.unneeded_exceptions(recorded, recorded["known"]) == []
    assert all(move["reason"] for move in recorded["moves"])
    for earlier, later in pairwise(recorded["moves"]):
        assert earlier["date"] <= later["date"]


def test_recorded_figures_follow_from_the_recorded_moves() -> None:
    """The last move of a figure is its present value: a figure that is edited by hand fails."""
    recorded = ledger.load()
    last: dict[tuple[str, str], Any] = {}
    for move in recorded["moves"]:
        for name, figures in move["figures"].items():
            for figure, (_, new) in figures.items():
                last[name, figure] = new
    for (name, figure), value in last.items():
        if name in recorded["groups"]:
            assert recorded["groups"][name].get(figure) == value, (name, figure)


@pytest.mark.parametrize("name", laws.LAWS)
def test_laws_compare_many_models(name: str) -> None:
    """Each law is checked on most models of the catalogue; one that compares nothing cannot
    fail.
    """
    checked = ledger.load()["laws"][name]["checked"]
    assert checked >= len(laws.models())


def test_saving_needs_every_group() -> None:
    command = [sys.executable, "-m", "benchmarks.accuracy.ledger", "--save", "--quick"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 2 and "leave out --quick" in done.stderr

"""The limits on accuracy: against published figures where the folder of them is there, and the days that need no data."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.accuracy import days, report
from benchmarks.accuracy.sections import Section


@pytest.fixture(scope="module")
def sections() -> dict[str, Section]:
    """The report's sections by title and role; by its first words where those are enough."""
    named = os.environ.get("HP_REFERENCE_DATA")
    if not named or not Path(named).is_dir():
        pytest.skip("HP_REFERENCE_DATA names no folder of measured figures")
    found = report.sections(Path(named))
    return {f"{s.title.split(',')[0]}|{s.role}": s for s in found} | {s.title: s for s in found}


def test_days_and_their_ratio() -> None:
    found = days.evaluate()
    assert 22.5 <= found["selective_sequence_parallel_days"] <= 24.5
    assert 29.5 <= found["full_recompute_days"] <= 31.5
    assert 1.29 <= found["ratio"] <= 1.35


def test_the_published_days_are_the_rule_of_2021_and_nothing_of_ours() -> None:
    assert days.published_days() == pytest.approx(33.9, abs=0.05)


def test_report_without_data_says_so_and_still_gives_the_days() -> None:
    environment = {key: value for key, value in os.environ.items() if key != "HP_REFERENCE_DATA"}
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.accuracy", "--json"], capture_output=True, text=True, env=environment, check=True
    )
    assert "skipped" in done.stderr
    found = json.loads(done.stdout)
    assert found["sections"] == [] and found["days"]["ratio"] > 1


def test_table_5_leaving_one_model_out(sections: dict[str, Section]) -> None:
    found = sections["Table 5|headline"].summary()
    assert found["rows"] == 9
    assert found["mean_error"] <= 0.04
    assert found["worst_error"] <= 0.09


def test_table_4_within_five_percent_and_every_difference_of_the_right_sign(sections: dict[str, Section]) -> None:
    section = sections["Table 4|in sample"]
    assert section.summary()["worst_error"] <= 0.05
    differences = report.table4_differences(section.comparisons)
    assert len(differences) == 6 and all(row["same_sign"] for row in differences)


def test_figures_1_and_7_as_printed(sections: dict[str, Section]) -> None:
    """Figure 1 to the byte; figure 7 is read off a plot, to about a tenth of a percent point."""
    for comparison in sections["Figures 1 and 7|headline"].comparisons:
        if comparison.source.startswith("Figure 1"):
            assert comparison.predicted == comparison.published, comparison
        else:
            assert comparison.predicted == pytest.approx(comparison.published, abs=0.15), comparison


def test_fsdp_runs_by_constants_that_never_saw_their_model_or_their_gpu(sections: dict[str, Section]) -> None:
    for out, limit in (("model", 0.06), ("GPU", 0.08)):
        found = sections[f"MPT under FSDP on A100 and H100, leaving one {out} out (s)"].summary()
        assert found["rows"] == 182
        assert found["mean_error"] <= limit


@pytest.mark.parametrize(
    ("title", "rows", "limit"),
    [
        ("Dense runs on H100, leaving one model out (s)", 34, 0.06),
        ("Dense recipes on GB200 (s)", 6, 0.08),
        ("LoRA of MLPerf (s)", 73, 0.10),
        ("LoRA of MLPerf on AMD, leaving one card out (s)", 9, 0.15),
    ],
)
def test_runs_on_gpus_that_the_constants_did_not_see(sections: dict[str, Section], title: str, rows: int, limit: float) -> None:
    found = next(section for section in sections.values() if section.title == title).summary()
    assert found["rows"] == rows
    assert found["mean_error"] <= limit


def test_cut_models_leaving_one_layout_out(sections: dict[str, Section]) -> None:
    """Runs whose overlap is known to be none; at TP 8 the host sets the pace."""
    found = sections["Dense models cut to fit 8 B200, leaving one layout out (s)"].summary()
    assert found["rows"] == 12
    assert found["mean_error"] <= 0.06
    assert found["worst_error"] <= 0.16  # without TP 8 nothing else here waits for its host


def test_experts_of_a_known_release_by_constants_that_saw_none_of_them(sections: dict[str, Section]) -> None:
    found = sections["Mixtures of experts, recipes of today's software (s)"].summary()
    assert found["rows"] == 7
    assert found["mean_error"] <= 0.15

"""The limits on accuracy against published figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from benchmarks.accuracy import evidence, headlines, ledger, report
from benchmarks.accuracy.data import folder_named
from benchmarks.accuracy.groups import Group, figures, votes
from benchmarks.accuracy.prepared import Prepared
from benchmarks.accuracy.runs import gb300_cases, recipe_cases, release_cases
from evidence.table import FOLDER

Figures = Callable[[str], Mapping[str, Any]]
"""Of a group, by its title."""


@pytest.fixture(scope="module")
def folder() -> Path:
    return folder_named()


@pytest.fixture(scope="module")
def groups(folder: Path) -> dict[str, Group]:
    """The report's groups by title: minutes, for each thing left out is a fit of its own."""
    return {group.title: group for group in evidence.groups(folder)}


@pytest.fixture(scope="module", params=["saved", pytest.param("computed", marks=pytest.mark.long)])
def figures_of(request: pytest.FixtureRequest) -> Figures:
    """As the pages show them, and as they are."""
    if request.param == "saved":
        saved = ledger.load()["groups"]
        names = {new: old for old, new in ledger.NAMES.items()}
        return lambda title: {names.get(name, name): value for name, value in saved[title].items()}
    computed: dict[str, Group] = request.getfixturevalue("groups")
    return lambda title: figures(computed[title].rows)


def test_days_and_their_ratio() -> None:
    found = headlines.training_days()
    assert 22.5 <= found["selective_sequence_parallel_days"] <= 24.5
    assert 29.5 <= found["full_recompute_days"] <= 31.5
    assert 1.29 <= found["ratio"] <= 1.35


def test_the_published_days_are_the_rule_of_2021_and_nothing_of_ours() -> None:
    assert headlines.published_2021_days() == pytest.approx(33.9, abs=0.05)


def test_the_repository_s_rows_are_used_unless_a_folder_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("HP_REFERENCE_DATA", raising=False)
    assert folder_named() == FOLDER
    assert folder_named(tmp_path) == tmp_path
    monkeypatch.setenv("HP_REFERENCE_DATA", str(tmp_path / "missing"))
    with pytest.raises(SystemExit, match="No folder of measured figures: "):
        folder_named()


def test_table_5_leaving_one_model_out(figures_of: Figures) -> None:
    found = figures_of("Table 5 of arXiv 2205.05198")
    assert found["rows"] == 9
    assert found["mean_error"] <= 0.04
    assert found["worst_error"] <= 0.09


@pytest.mark.long
def test_table_4_within_five_percent_and_every_difference_of_the_right_sign(
    groups: dict[str, Group],
) -> None:
    group = groups["Table 4 of arXiv 2205.05198, one layer"]
    assert figures(group.rows)["worst_error"] <= 0.05
    differences = report.table4_differences(group.rows)
    assert len(differences) == 6 and all(row["same_sign"] for row in differences)


@pytest.mark.long
def test_figures_1_and_7_as_printed(groups: dict[str, Group]) -> None:
    """Figure 1 to the byte; figure 7 is read off a plot, to about a tenth of a percent point."""
    for comparison in groups["Figures 1 and 7 of arXiv 2205.05198"].rows:
        if comparison.source.startswith("Figure 1"):
            assert comparison.predicted == comparison.published, comparison
        else:
            assert comparison.predicted == pytest.approx(comparison.published, abs=0.15), comparison


@pytest.mark.parametrize(
    ("title", "rows", "limit"),
    [
        ("MPT under FSDP", 182, 0.06),
        ("MPT under FSDP on an unseen GPU", 182, 0.08),
        ("Dense pre-training on H100 in fp8", 46, 0.055),
        ("Dense recipes on GB200", 19, 0.08),
        ("LoRA of MLPerf on AMD", 9, 0.15),
        ("The next release: dense recipes", 45, 0.06),
        ("Primus' schedules relative to 1F1B", 6, 0.03),
    ],
)
def test_runs_that_the_constants_did_not_see(
    figures_of: Figures, title: str, rows: int, limit: float
) -> None:
    found = figures_of(title)
    assert found["rows"] == rows
    assert found["mean_error"] <= limit


@pytest.mark.long
def test_dense_pretraining_without_the_round_that_no_fit_has_seen(groups: dict[str, Group]) -> None:
    rows = [
        row for row in groups["Dense pre-training on H100 in fp8"].rows if " v3.0 " not in row.what
    ]
    assert len(rows) == 41
    assert figures(rows)["mean_error"] <= 0.06


@pytest.mark.long
def test_lora_of_mlperf_row_by_row(groups: dict[str, Group]) -> None:
    rows = groups["LoRA of MLPerf"].rows
    assert len(rows) == 73
    assert sum(abs(row.error) for row in rows) / len(rows) <= 0.10


@pytest.mark.long
def test_cut_models_leaving_one_layout_out(groups: dict[str, Group]) -> None:
    """Runs whose overlap is known to be none; at TP 8 the host sets the pace."""
    found = figures(
        [row for row in groups["Models cut to fit 8 B200"].rows if row.model.startswith("llama")]
    )
    assert found["rows"] == 12
    assert found["mean_error"] <= 0.06
    assert found["worst_error"] <= 0.16  # without TP 8 nothing else here waits for its host


@pytest.mark.parametrize(
    ("title", "limit"),
    [
        ("MoE models, releases from 26.02.01 on", 0.15),
        ("MoE models on an unseen GPU", 0.15),
        ("MoE models, unseen release", 0.12),
    ],
)
def test_experts_with_a_model_a_gpu_or_a_release_left_out(
    figures_of: Figures, title: str, limit: float
) -> None:
    """Three models on three GPUs under today's software, with the knobs of each release."""
    found = figures_of(title)
    assert found["rows"] == 29
    assert found["mean_error"] <= limit
    assert found["coverage"] >= found["coverage_range"][0] and found["width"] <= 2.0


@pytest.mark.long
def test_duplicates_count_once(groups: dict[str, Group], folder: Path) -> None:
    """Rows of the two Bridge tables: 82 and 41, of which 23 are in both; and eleven submitters of
    one setting are one vote.
    """
    assert (
        len(release_cases(folder)) == 82 + 41 - 23 - 2
    )  # two rows stand twice in the older table itself
    eleven = [row for row in groups["LoRA of MLPerf"].rows if row.what.startswith("B200 x8, v5.0")]
    assert len(eleven) == 11 and len(votes(eleven)) == 1


def test_recipes_run_as_their_release_sets_them(folder: Path) -> None:
    """DeepSeek-V3 in 16 chunks as its library lays it out; a row without settings by its release's
    preset.
    """
    laid_out = {
        (
            Prepared.from_case(case).estimate.parallel.pipeline_layout,
            case.query.model == "deepseek-v3",
        )  # type: ignore[union-attr]
        for case in recipe_cases(folder)
        if case.name == "deepseek-v3" and "H100" not in case.what
    }
    assert laid_out == {("Et*4|(t*4|)*14tmL", True), ("Et*4|(t*4|)*14tL", False)}
    (qwen,) = (
        case
        for case in gb300_cases(folder)
        if case.name == "qwen3-30b-a3b" and case.release == "25.11"
    )
    training = qwen.query.training
    assert training is not None and training.cuda_graph_modules == ("moe_router", "moe_preprocess")
    assert (
        qwen.query.parallel.moe_token_dispatcher_type == "flex"
        and training.parameter_precision == "fp8"
    )

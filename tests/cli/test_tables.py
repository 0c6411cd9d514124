"""What a table shows of a configuration, and how tables look on screens of several widths."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
from rich.cells import cell_len
from rich.measure import Measurement

from hp_tool.cli import layout, tables
from hp_tool.domain.parallel import ParallelConfig
from hp_tool.domain.units import format_duration
from hp_tool.wording import rankings
from hp_tool.wording.columns import Column, configuration_columns, terminal_columns
from hp_tool.wording.words import layout_arithmetic
from tests.cli import shown


def heads(*configs: ParallelConfig) -> list[str]:
    return [column.head for column in configuration_columns(configs)]


def test_context_and_expert_columns_stand_only_where_they_are_used() -> None:
    plain, experts = (
        ParallelConfig(data_parallel_size=8),
        ParallelConfig(data_parallel_size=8, expert_parallel_size=4),
    )
    assert not {"VPP", "CP", "EP", "ETP"} & set(heads(plain))
    assert "EP" in heads(plain, experts) and not {"CP", "ETP"} & set(heads(plain, experts))
    (column,) = [
        column for column in configuration_columns([plain, experts]) if column.head == "EP"
    ]
    assert column.cells == ("1", "4")


def test_the_arithmetic_names_experts() -> None:
    assert "EP 4" in layout_arithmetic(ParallelConfig(data_parallel_size=8, expert_parallel_size=4))
    assert "EP" not in layout_arithmetic(ParallelConfig(data_parallel_size=8))


@pytest.mark.parametrize("width", shown.WIDTHS)
def test_screens_look_as_they_did(width: int) -> None:
    """Where a change is meant: `python -m tests.cli.shown`, and read the difference."""
    text = shown.rendered(width)
    assert text == (shown.FOLDER / f"{width}.txt").read_text(encoding="utf-8")
    assert max(map(cell_len, text.splitlines())) <= width


@pytest.mark.parametrize("width", shown.WIDTHS)
def test_every_screen_has_what_an_answer_is_trusted_by(width: int) -> None:
    """The step with its interval in every row, which one is not validated, each on one line."""
    text = shown.rendered(width)
    recommend = text.partition("$ recommend\n")[2].partition("$ tune")[0]
    for rank, ends in ((1, "18.07-20.98"), (2, "18.20-21.14"), (3, "661.97-768.74*")):
        (row,) = [line for line in recommend.splitlines() if line.lstrip().startswith(f"{rank} ")]
        assert ends in row
    assert "* not validated: no published run uses dualpipe-v" in " ".join(recommend.split())
    assert "tokens/s per GPU" in " ".join(recommend.split())
    assert "MFU" in text.partition("$ recommend")[0]


def test_a_pipe_gets_every_column_and_whole_lines(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    tables.print_recommendations(shown.recommendations(), top=5)
    text = capsys.readouterr().out
    assert "left out" not in text
    head = next(line for line in text.splitlines() if line.startswith("rank"))
    assert {"chunks", "CP", "step", "interval", "tokens", "MFU", "memory", "days"} <= set(
        head.split()
    )
    assert not {"TP", "SP", "ZeRO"} & set(head.split()), "they agree in every row"
    assert any(line.startswith("Use TP 4, PP 8 (6 chunks), ") for line in text.splitlines())


def test_every_row_has_its_step_before_calibration_if_one_was_calibrated(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    answer = shown.recommendations()
    first, *others = answer.recommendations
    provenance = {"calibration": {"measurements": 3, "version": 1}}
    estimate = replace(shown.estimate(18.0), provenance=provenance)
    rows = (replace(first, calibrated_estimate=estimate), *others)
    tables.print_recommendations(replace(answer, recommendations=rows), top=5)
    text = capsys.readouterr().out
    before = [line.split() for line in text.splitlines() if line.lstrip().startswith(("1 ", "2 "))]
    assert "uncalibrated" in text
    assert "19.43" in before[0] and "18.00" in before[0] and before[1].count("19.57") == 2


def test_every_figure_of_a_calibrated_estimate_is_of_the_step_that_is_shown(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    provenance = {
        "calibration": {"measurements": 3, "version": 1},
        "measured": {"runs": 2, "step_s": 17.5},
    }
    alone = shown.estimate(19.43)
    assert alone.time is not None and alone.mfu is not None
    parts = {name: seconds * 18.0 / 19.43 for name, seconds in alone.time.parts_s.items()}
    calibrated = replace(
        alone,
        time=replace(alone.time, step_s=18.0, parts_s=parts),
        mfu=0.61,
        provenance=provenance,
    )
    tables.print_estimate(alone, calibrated=calibrated)
    text = capsys.readouterr().out
    assert "18.00 s per step" in text and "MFU 61.0%" in text and "54.6%" not in text
    assert text.count("19.43") == 1 and "19.43 s per step without." in text
    assert "This layout ran on this cluster: 17.50 s per step (median of 2 runs)." in text
    lines = text[text.index("Step time") :].splitlines()
    compute = next(line for line in lines if line.startswith("compute"))
    assert f"{parts['compute']:.2f}" in compute


@pytest.mark.parametrize(
    ("variables", "coloured"),
    [({"FORCE_COLOR": "1"}, True), ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, False)],
)
def test_no_color_means_none(variables: dict[str, str], coloured: bool) -> None:
    code = "from hp_tool.cli.layout import make_console; make_console().print('[red]memory[/red]')"
    printed = subprocess.run(
        [sys.executable, "-c", code], env={**variables}, capture_output=True, text=True, check=True
    ).stdout
    assert ("\x1b[31m" in printed) is coloured


def test_full_attention_shares_of_peak_stand_beside_the_causal_half(
    capsys: pytest.CaptureFixture[str],
) -> None:
    tables.print_estimate(shown.estimate(19.43))
    text = " ".join(capsys.readouterr().out.split())
    assert (
        "MFU 54.6%, HFU 62.3% with attention counted in full; MFU 43.2%, HFU 47.3% with its causal "
        "half" in text
    )


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.0123, "12.3 ms"),
        (19.43, "19.43 s"),
        (711.84, "711.8 s"),
        (6_840.0, "6,840 s"),
        (11_520.0, "3.2 h"),
    ],
)
def test_step_times_are_told_apart_in_seconds(seconds: float, words: str) -> None:
    assert format_duration(seconds) == words


def test_a_column_has_one_unit() -> None:
    step = terminal_columns([rankings.STEP], [shown.estimate(0.8), shown.estimate(12.0)])[0]
    assert (step.title, step.cells) == ("step, s", ("0.80", "12.00"))


@pytest.mark.parametrize("gap", [1, 2])
@pytest.mark.parametrize(
    "columns",
    [
        [Column(head="a", cells=("1", "22"))],
        [
            Column(head="step", unit="s", cells=("1", "模型")),
            Column(head="why", cells=("two\nlines", ""), left=True),
        ],
        [Column(head="a", cells=()), Column(head="bb", cells=()), Column(head="", cells=())],
    ],
)
def test_a_table_s_width_is_the_one_that_it_is_printed_in(columns: list[Column], gap: int) -> None:
    console = layout.make_console()
    table = layout._make_table(columns, gap=gap)
    measured = Measurement.get(console, console.options.update(width=layout.PIPE_WIDTH), table)
    assert layout.table_width(columns, gap=gap) == measured.maximum


@pytest.mark.parametrize(("groups", "words"), [((1, 2), ""), ((1, 1, 2), "Ranks 1 to 2 are tied")])
def test_only_several_rows_of_a_group_cannot_be_told_apart(
    groups: tuple[int, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    row = shown.serving_recommendations().recommendations[0]
    tables.print_groups(layout.make_console(), [replace(row, group=group) for group in groups])
    text = capsys.readouterr().out
    assert text.startswith(words) and bool(text) is bool(words)

"""Results that come back in what a job prints."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hp_tool.cluster.launchers import streamed, supervisor
from hp_tool.cluster.launchers.jobs import Ending
from hp_tool.domain.measurement import Hardware, Measurement
from tests.launchers.contract import GOOD, plan

HARDWARE = Hardware(gpu="cpu", num_gpus=1)


def run(folder: Path, script: str, **changes: float) -> str:
    """What a job prints that is run where nobody sees its folder."""
    folder.mkdir()
    for name, text in streamed.job_files(plan(script, **changes)).items():  # type: ignore[arg-type]
        (folder / name).write_text(text)
    command = [sys.executable, streamed.SUPERVISOR, "--attached", "."]
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, check=False, timeout=60
    ).stdout


def measured(text: str) -> Measurement:
    return streamed.measure(
        streamed.parse_output(text), ending=Ending(reason="lost"), timeout_s=60.0, hardware=HARDWARE
    )


def test_a_result_and_the_jobs_own_words(tmp_path: Path) -> None:
    text = (
        "the engine says hello\n"
        + run(tmp_path / "job", "print('one')\nprint('two', end='')\n" + GOOD)
        + "and goodbye\n"
    )
    found = streamed.parse_output(text)
    assert found.log == "one\ntwo"
    assert found.ended is not None and found.ended["exit_code"] == 0
    measurement = measured(text)
    assert (measurement.status, measurement.step_s) == ("ok", 0.5)
    assert measurement.wall_s is not None and measurement.wall_s < 30


def test_the_accounts_of_ranks_and_what_was_asked_for(tmp_path: Path) -> None:
    accounts = {
        "result.rank3.json": {"status": "crashed", "cause": "rank 3: RuntimeError: first"},
        "result.rank1.json": {
            "status": "crashed",
            "cause": "rank 1: RuntimeError: Connection closed by peer",
        },
    }
    script = "".join(
        f"open({name!r}, 'w').write({json.dumps(each)!r})\n" for name, each in accounts.items()
    )
    text = run(tmp_path / "job", script + "raise SystemExit(1)")
    assert list(streamed.parse_output(text).files) == list(
        accounts
    )  # in the order in which they were written
    assert measured(text).cause == "rank 3: RuntimeError: first"


def test_results_are_bounded(tmp_path: Path) -> None:
    text = run(tmp_path / "job", "open('result.json', 'w').write('x' * 10_000_000)")
    assert len(text) < 1000
    assert measured(text).cause == "exit code 0 without a result: the log is empty"


def test_a_log_without_end_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HP_JOB_LOG_MIB", "1")
    text = run(tmp_path / "job", "while True: print('x' * 4096)", timeout_s=10.0)
    assert len(text) < 2 * 2**20
    measurement = measured(text)
    assert measurement.status == "crashed" and "the log exceeded 1 MiB" in (measurement.cause or "")


def test_the_folder_it_came_in_stays_as_it_was(tmp_path: Path) -> None:
    run(tmp_path / "job", GOOD)
    assert sorted(path.name for path in (tmp_path / "job").iterdir()) == [
        "job.json",
        "job.py",
        "supervisor.py",
    ]


def test_a_job_that_was_cut_off_is_what_the_engine_says(tmp_path: Path) -> None:
    text = run(tmp_path / "job", "print('one')\n" + GOOD)
    begun = text[: text.index("one") + 4]
    assert streamed.parse_output(begun).log == "one\n"
    assert measured(begun).status == "preempted"
    assert measured(text[: text.index('"file"') + 20]).status == "preempted"


def test_several_nodes_are_one_job(tmp_path: Path) -> None:
    good, bad = run(tmp_path / "a", GOOD), run(tmp_path / "b", "raise ValueError('no')")
    text = "".join(
        f'\n<<<hp-tool:{{"node": {n}}}:hp-tool>>>\n{each}' for n, each in enumerate((good, bad))
    )
    parts = streamed.split_nodes(text)
    assert len(parts) == 2 and streamed.split_nodes(good) == [good]
    both = streamed.join_nodes([streamed.parse_output(part) for part in parts])
    assert both.ended is not None and both.ended["exit_code"] == 1
    assert "ValueError: no" in both.log
    assert (
        streamed.measure(
            both, ending=Ending(reason="lost"), timeout_s=1.0, hardware=HARDWARE
        ).status
        == "ok"
    )


@given(st.text(alphabet="<>:hp-tol{}\"'\n fileadnxt", max_size=200))
def test_nothing_that_is_printed_breaks_the_reader(text: str) -> None:
    begin, end = supervisor.MARK
    for each in (
        text,
        f"{begin}{text}{end}",
        f'{begin}{{"began": 1}}{end}\n{text}\n{begin}{{"ended": {{}}}}{end}',
    ):
        streamed.parse_output(each)


@pytest.mark.parametrize("name", ["../../etc/x", "..", "", "a b"])
def test_a_name_that_leaves_the_folder_is_no_file(name: str) -> None:
    begin, end = supervisor.MARK
    printed = streamed.parse_output(
        f'{begin}{json.dumps({"file": name, "text": ""})}{end}\n{begin}{{"ended": {{"reason": '
        f'"exited"}}}}{end}'
    )
    assert printed.files == {} and printed.ended == {"reason": "exited"}


def test_the_first_start_counts_whatever_the_job_prints_later() -> None:
    begin, end = supervisor.MARK
    later = [f'{begin}{{"began": {value}}}{end}\n' for value in ('"now"', "9e9", "[]")]
    assert streamed.parse_output(f'{begin}{{"began": 5.0}}{end}\n' + "".join(later)).began == 5.0
    assert streamed.parse_output(later[0]).began is None

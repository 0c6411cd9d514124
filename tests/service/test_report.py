"""`hp-tool report`: one file with a search's figures and everything that shows them; and its study
for Optuna's tools.
"""

import json
import re
from pathlib import Path

import optuna
import pytest
from typer.testing import CliRunner

from hp_tool.cli.main import build
from hp_tool.domain.measurement import Measurement
from hp_tool.domain.parallel import ParallelConfig
from hp_tool.errors import HpToolError
from hp_tool.loop.tuning import study_storage
from hp_tool.questions.schema import parse_query, to_dict
from hp_tool.store import open_store
from tests.service.coordinator import claim, finish, one_run

EVIL = "</script><script>alert('x')</script>"
OTHER = ParallelConfig(tensor_parallel_size=2, sequence_parallel=True)


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'hp.sqlite3'}"


@pytest.fixture
def search(url: str, query: dict[str, object]) -> str:
    store = open_store(url)
    try:
        search_id = store.create_search(query=to_dict(parse_query(query))).id
        lease = claim(store, search_id)
        one_run(
            store, lease, Measurement(status="ok", step_s=0.4, tokens_per_second_per_gpu=1280.0)
        )
        one_run(store, lease, Measurement(status="crashed", cause=EVIL, log_tail=EVIL), OTHER)
        finish(store, lease)
        return search_id
    finally:
        store.close()


def hp_tool(*arguments: str) -> tuple[int, str]:
    """0 and what was printed, or 2 and what is wrong, as the command line tells them apart."""
    done = CliRunner().invoke(build(), [*arguments])
    if isinstance(done.exception, HpToolError):
        return 2, done.exception.message
    return done.exit_code, done.output


def test_the_file_holds_everything_and_nothing_a_user_wrote_is_markup(
    url: str, search: str, tmp_path: Path
) -> None:
    path = tmp_path / "report.html"
    code, said = hp_tool("report", search, "-o", str(path), "--database-url", url)
    assert (code, said.strip()) == (0, str(path))
    text = path.read_text()
    assert len(text.encode()) <= 400_000
    assert EVIL not in text
    assert re.findall(r"<(?:script|link|img)[^>]+(?:src|href)=", text) == []
    assert re.findall(r'from "(?!data:)', text.rsplit('<script type="module">', 1)[1]) == []
    trials = json.loads(
        re.findall(
            r'<script type="application/json" id="trial-table">(.*?)</script>', text, re.DOTALL
        )[0]
    )
    assert trials["measured_step_s"] == [0.4, None]
    assert trials["logs"] == {trials["run_id"][1]: EVIL}
    assert " 2 = 2 devices" in text


def test_what_cannot_be_reported_is_said(url: str, search: str, tmp_path: Path) -> None:
    assert hp_tool("report", "0" * 16, "--database-url", url)[0] == 2
    assert (
        hp_tool("report", search, "-o", str(tmp_path / "no" / "where.html"), "--database-url", url)[
            0
        ]
        == 2
    )
    code, said = hp_tool(
        "report", search, "--optuna", str(tmp_path / "study.db"), "--database-url", url
    )
    assert (code, "no Optuna study" in said) == (2, True)


def test_the_study_stands_in_a_file_of_its_own(url: str, search: str, tmp_path: Path) -> None:
    study = optuna.create_study(storage=study_storage(url), study_name=search)
    study.add_trial(optuna.trial.create_trial(value=0.4, params={}, distributions={}))
    path = tmp_path / "study.db"
    assert hp_tool("report", search, "--optuna", str(path), "--database-url", url)[0] == 0
    copied = optuna.load_study(storage=f"sqlite:///{path}", study_name=search)
    assert [trial.value for trial in copied.trials] == [0.4]
    code, said = hp_tool("report", search, "--optuna", str(path), "--database-url", url)
    assert (code, "already" in said) == (2, True)

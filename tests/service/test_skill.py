"""The agent skill has the common form, and its evals hold: their calls are executed, and the key
facts of the answers are asserted.
"""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import anyio
import pytest
import yaml

from benchmarks.skill import evals
from service.agents import SKILL
from tests.conftest import skip_or_fail

ANSWER = {"rank": 1, "figures": {"step_s": {"value": 2.5}}, "rows": ["a GiB"]}


def test_the_skill_has_the_common_form() -> None:
    _, header, body = SKILL.read_text(encoding="utf-8").split("---\n", 2)
    front = yaml.safe_load(header)
    assert set(front) == {"name", "description", "license", "compatibility"}
    assert front["name"] == SKILL.parent.name
    assert len(front["description"]) <= 1024 and len(front["compatibility"]) <= 500
    assert len(body.splitlines()) < 500


@pytest.mark.components
def test_a_linter_of_skills_finds_no_fault(tmp_path: Path) -> None:
    if find_spec("skillsaw") is None:
        skip_or_fail(
            component="SCHEMAS", reason="skillsaw is not installed: pip install 'hp-tool[dev]'"
        )
    command = [sys.executable, "-m", "skillsaw", "lint", "--strict"]
    done = subprocess.run([*command, SKILL.parents[1]], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    broken = tmp_path / "skills/other/SKILL.md"
    broken.parent.mkdir(parents=True)
    broken.write_text(SKILL.read_text(encoding="utf-8"))
    assert subprocess.run([*command, tmp_path / "skills"], capture_output=True).returncode != 0


def test_there_are_ten_evals_whose_expected_answers_match() -> None:
    tasks = evals.read_evals()
    assert json.loads(evals.EVALS.read_text())["skill_name"] == SKILL.parent.name
    assert [task.id for task in tasks] == list(range(1, 11))
    for task in tasks:
        assert task.assertions and task.answer_matches, task.id
        assert task.unmatched(task.expected_output) == [], task.id
        assert task.unmatched("no idea") != [], task.id
        for call in task.calls:
            assert ("refused" in call) != bool(call.get("facts")), task.id


@pytest.mark.parametrize(
    ("fact", "broken"),
    [
        (["rank", "==", 1], False),
        (["rank", "==", 2], True),
        (["figures.step_s.value", "<", 3], False),
        (["figures.step_s.value", ">", 3], True),
        (["rows.0", "contains", "GiB"], False),
        (["rows.0", "contains", "TiB"], True),
        (["rows.1", "contains", "GiB"], True),
        (["figures.mfu.value", ">", 0], True),
    ],
)
def test_a_broken_fact_is_found(fact: list[Any], broken: bool) -> None:
    assert bool(evals.broken_facts(ANSWER, [fact])) == broken


@pytest.mark.components
def test_the_calls_of_all_evals_answer_with_their_facts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if find_spec("mcp") is None:
        skip_or_fail(component="MCP", reason="the MCP SDK (the mcp extra) is not installed")
    from mcp import Client

    from service.agents.server import _local_service, build
    from service.agents.tools import Tools

    monkeypatch.setenv("HP_RUNS_DIR", str(tmp_path / "runs"))
    found: list[str] = []

    async def drive() -> None:
        async with _local_service(f"sqlite:///{tmp_path / 'hp.sqlite3'}") as service:
            server = build(Tools(connect=lambda _: nullcontext(service), own_files=True))
            async with Client(server) as client:
                for task in evals.read_evals():
                    for call in task.calls:
                        result = await client.call_tool(call["tool"], call["arguments"])
                        text = result.content[0].text
                        if "refused" in call:
                            broken = [] if call["refused"] in text and result.is_error else [text]
                        elif result.is_error:
                            broken = [text]
                        else:
                            broken = evals.broken_facts(result.structured_content, call["facts"])
                        found.extend(f"{task.id}, {call['tool']}: {each}" for each in broken)

    anyio.run(drive)
    assert found == []


@pytest.mark.parametrize(("words", "passed"), [("rank 1", False), (None, True)])
def test_an_agent_is_run_by_hand(tmp_path: Path, words: str | None, passed: bool) -> None:
    """The command prints what the agent's answers lack; this agent knows the expected ones."""
    agent = tmp_path / "agent.py"
    answers = {task.prompt: words or task.expected_output for task in evals.read_evals()}
    agent.write_text(f"import sys\nprint({answers!r}[sys.argv[1]])\n")
    command = [sys.executable, "-m", "benchmarks.skill", "--agent", f"{sys.executable} {agent}"]
    done = subprocess.run([*command, "--only", "1", "2"], capture_output=True, text=True)
    assert done.returncode == (not passed), done.stderr
    assert ("2 of 2 passed" if passed else "0 of 2 passed") in done.stdout

"""What the documentation tells people to type and write works, and what it points to exists."""

from __future__ import annotations

import io
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from hp_tool import answers, catalog, training
from hp_tool.catalog import library
from hp_tool.cli.batches import sources
from hp_tool.cli.main import build, main
from hp_tool.queries import schema

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
README = (ROOT / "README.md").read_text(encoding="utf-8")
ANSWERED = ("estimate", "recommend")


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page, re.DOTALL)


def shown_commands() -> dict[str, list[str]]:
    """Commands of the README that answer a query, each with the lines of output shown below it."""
    found: dict[str, list[str]] = {}
    for block in blocks(README, "console"):
        command = ""
        for line in block.splitlines():
            if line.startswith("$ "):
                command = line.removeprefix("$ hp-tool ").partition("#")[0]
                if command.startswith(ANSWERED):
                    found[command] = []
            elif command in found:
                found[command].append(line)
    return found


COMMANDS = shown_commands()
NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")
STALE = 0.05
"""Predictions may move by this share before the page has to follow."""


def parts(line: str) -> tuple[str, list[float]]:
    """The words of a line, and its numbers."""
    numbers = [float(number.replace(",", "")) for number in NUMBER.findall(line)]
    return " ".join(NUMBER.sub("#", line).split()), numbers


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
        assert target.startswith("http") or (page.parent / target).exists(), target


def test_the_readme_shows_commands() -> None:
    assert len(COMMANDS) >= 4
    assert sum(map(len, COMMANDS.values())) >= 10


@pytest.mark.parametrize("command", COMMANDS)
def test_the_readme_shows_what_its_commands_print(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["hp-tool", *shlex.split(command)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code in (0, 3)
    printed: dict[str, list[list[float]]] = {}
    for line in capsys.readouterr().out.splitlines():
        words, numbers = parts(line)
        printed.setdefault(words, []).append(numbers)
    assert printed
    for line in COMMANDS[command]:
        words, numbers = parts(line)
        if "..." not in words and "ranked in" not in words:
            assert any(numbers == pytest.approx(each, rel=STALE) for each in printed.get(words, [])), line


def test_ci_runs_the_test_command_of_the_readme() -> None:
    (command,) = [line for block in blocks(README, "bash") for line in block.splitlines() if "pytest" in line]
    assert command in (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()


def typed_commands() -> list[tuple[str, str]]:
    """Every `hp-tool` command of the pages' shell blocks, with its page."""
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for block in (*blocks(text, "console"), *blocks(text, "bash")):
            for line in block.replace("\\\n", " ").splitlines():
                if match := re.search(r"(?:^\$ |&& |^)(?:\S*/)?hp-tool (.*)", line):
                    found.append((page.name, re.split(r"\s[|>&<#]|;", match[1])[0]))
    return found


@pytest.mark.parametrize(("page", "command"), typed_commands())
def test_commands_of_the_documentation_exist_with_their_options(page: str, command: str) -> None:
    words = shlex.split(command)
    node: Any = typer.main.get_command(build())
    while hasattr(node, "commands") and words and words[0] in node.commands:
        node = node.commands[words.pop(0)]
    assert not hasattr(node, "commands"), f"{page}: no command {command}"
    known = {option for parameter in node.params for option in (*parameter.opts, *parameter.secondary_opts)} | {"--help"}
    assert {word.partition("=")[0] for word in words if word.startswith("-") and word != "-"} <= known


def test_the_tutorial_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
    (query,) = blocks(text, "yaml")
    (tmp_path / "query.yaml").write_text(query)
    monkeypatch.chdir(tmp_path)
    codes = []
    for line in "".join(blocks(text, "console")).splitlines():
        command, _, target = line.removeprefix("$ hp-tool ").partition(" > ")
        if command.startswith("tune"):  # the quickstart has its own test
            continue
        monkeypatch.setattr(sys, "argv", ["hp-tool", *shlex.split(command)])
        with pytest.raises(SystemExit) as ended:
            main()
        codes.append(ended.value.code)
        printed = capsys.readouterr().out
        if target:
            (tmp_path / target).write_text(printed)
    assert codes == [3, 0, 0, 0, 0]  # the first one does not fit
    assert "--tensor-model-parallel-size" in printed


ELSEWHERE = {"search.md", "service.md"}
"""Pages whose Python runs in the tests of what they explain: it needs a study, a server."""
PYTHON = [
    (page.name, block)
    for page in PAGES
    if page.name not in ELSEWHERE
    for block in blocks(page.read_text(encoding="utf-8"), "python")
]


@pytest.mark.parametrize(("page", "block"), PYTHON, ids=[page for page, _ in PYTHON])
def test_python_of_the_documentation_runs(page: str, block: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    exec(compile(block, page, "exec"), {"__name__": "documentation"})


def test_the_grid_of_the_documentation_is_answered() -> None:
    (grid,) = blocks((ROOT / "docs" / "batch.md").read_text(encoding="utf-8"), "csv")
    queries = [schema.parse_query(item) for item in sources.items(io.BytesIO(grid.encode()), format="csv", base={})]
    assert [query.id for query in queries][:2] == ["dense tp=4 mbs=1", "dense tp=4 mbs=2"]
    assert all(training.estimate(query=query, with_fixes=False).time is not None for query in queries)


QUERIES = [path for path in sorted((ROOT / "examples").glob("*.yaml")) if "kind" in yaml.safe_load(path.read_bytes())]


@pytest.mark.parametrize("path", QUERIES, ids=lambda path: path.name)
def test_example_queries_have_an_answer(path: Path) -> None:
    query = schema.parse_query(path.read_bytes())
    assert answers.recommend_answer(query, top=1).recommendations


def written(page: str) -> list[tuple[str, dict[str, Any]]]:
    """YAML blocks of docs/queries.md with the file their first line names."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    return [(block.splitlines()[0], yaml.safe_load(block)) for block in blocks(text, "yaml")]


def test_the_query_of_the_documentation_is_one() -> None:
    (example,) = [block for block in blocks((ROOT / "docs/queries.md").read_text(), "yaml") if block.startswith("id:")]
    assert training.recommend(query=schema.parse_query(example), top=1).recommendations


def test_own_files_of_the_documentation_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for head, content in written("queries.md"):
        if match := re.match(r"# my-catalogue/(\S+\.yaml)", head):
            path = tmp_path / match[1]
            path.parent.mkdir(exist_ok=True)
            path.write_text(yaml.safe_dump(content))
    monkeypatch.setenv("HP_CATALOG_DIR", str(tmp_path))
    library.clear_cache()
    try:
        cluster = catalog.cluster("my-cluster")
    finally:
        library.clear_cache()
    assert (cluster.gpu.name, cluster.num_nodes) == ("my-gpu", 32)

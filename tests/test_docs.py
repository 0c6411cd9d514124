"""What the documentation tells people to type and write works, and what it points to exists."""

from __future__ import annotations

import io
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from hp_tool import catalog
from hp_tool.catalog import library
from hp_tool.cli.batches import sources
from hp_tool.cli.main import build
from hp_tool.questions import answers, schema, training
from tests import console

ROOT = Path(__file__).parents[1]
PAGES = console.PAGES
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page, re.DOTALL)


def test_links_lead_somewhere(subtests: pytest.Subtests) -> None:
    for page in PAGES:
        with subtests.test(page=str(page)):
            for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
                assert target.startswith("http") or (page.parent / target).exists(), target


def test_the_readme_shows_commands() -> None:
    commands = [each for each in console.shown(README) if each.lines]
    assert len(commands) >= 2
    assert sum(len(each.lines) for each in commands) >= 6


COMMANDS = [page for page in PAGES if console.shown(page.read_text(encoding="utf-8"))]


@pytest.mark.components
@pytest.mark.parametrize("page", COMMANDS, ids=lambda page: page.name)
def test_a_page_shows_what_its_commands_print(page: Path, tmp_path: Path) -> None:
    for shown, printed in console.run_page(page.read_text(encoding="utf-8"), tmp_path):
        for line in shown.lines:
            assert console.is_among(line, printed), (
                f"python -m tests.console writes it anew: {line}"
            )


def test_a_number_that_moved_is_seen_and_written_anew(tmp_path: Path) -> None:
    page = (
        "```console\n$ echo 'GiB  1,022.5 fits ...' > answer.txt\nGiB    98.5 fits ...\nGiB "
        "1,022.5 ...\n```\n"
    )
    for folder in ("seen", "written"):
        (tmp_path / folder).mkdir()
    ((shown, printed),) = console.run_page(page, tmp_path / "seen")
    assert [console.is_among(line, printed) for line in shown.lines] == [False, True]
    assert console.refreshed(page, tmp_path / "written") == page.replace(
        "   98.5", "1,022.5"
    )  # the column stays


def test_ci_runs_the_test_command_of_the_readme() -> None:
    (command,) = [
        line for block in blocks(README, "bash") for line in block.splitlines() if "pytest" in line
    ]
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


def test_commands_of_the_documentation_exist_with_their_options(subtests: pytest.Subtests) -> None:
    program = typer.main.get_command(build())
    for page, command in typed_commands():
        with subtests.test(page=str(page), command=str(command)):
            words = shlex.split(command)
            node: Any = program
            while hasattr(node, "commands") and words and words[0] in node.commands:
                node = node.commands[words.pop(0)]
            assert not hasattr(node, "commands"), f"{page}: no command {command}"
            known = {
                option
                for parameter in node.params
                for option in (*parameter.opts, *parameter.secondary_opts)
            } | {"--help"}
            assert {
                word.partition("=")[0] for word in words if word.startswith("-") and word != "-"
            } <= known


ELSEWHERE = {"search.md", "service.md"}
"""Pages whose Python runs in the tests of what they explain: it needs a study, a server."""
PYTHON = [
    (page.name, block)
    for page in PAGES
    if page.name not in ELSEWHERE
    for block in blocks(page.read_text(encoding="utf-8"), "python")
]


@pytest.mark.parametrize(("page", "block"), PYTHON, ids=[page for page, _ in PYTHON])
def test_python_of_the_documentation_runs(
    page: str, block: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    exec(compile(block, page, "exec"), {"__name__": "documentation"})


def test_the_grid_of_the_documentation_is_answered() -> None:
    (grid,) = blocks((ROOT / "docs" / "batch.md").read_text(encoding="utf-8"), "csv")
    queries = [
        schema.parse_query(item)
        for item in sources.read_items(io.BytesIO(grid.encode()), format="csv", base={})
    ]
    assert [query.id for query in queries][:2] == ["dense tp=4 mbs=1", "dense tp=4 mbs=2"]
    assert all(
        training.estimate(query=query, with_fixes=False).time is not None for query in queries
    )


QUERIES = [
    path
    for path in sorted((ROOT / "examples").glob("*.yaml"))
    if "kind" in yaml.safe_load(path.read_bytes())
]


@pytest.mark.parametrize("path", QUERIES, ids=lambda path: path.name)
def test_example_queries_have_an_answer(path: Path) -> None:
    query = schema.parse_query(path.read_bytes())
    assert answers.answer_recommend(query, top=1).recommendations


def written(page: str) -> list[tuple[str, dict[str, Any]]]:
    """YAML blocks of docs/queries.md with the file their first line names."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    return [(block.splitlines()[0], yaml.safe_load(block)) for block in blocks(text, "yaml")]


def test_the_query_of_the_documentation_is_one() -> None:
    (example,) = [
        block
        for block in blocks((ROOT / "docs/queries.md").read_text(), "yaml")
        if block.startswith("id:")
    ]
    assert training.recommend(query=schema.parse_query(example), top=1).recommendations


def test_own_files_of_the_documentation_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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

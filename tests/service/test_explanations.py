"""POST /v1/explanations over a socket: the command's very answer, refusals by name, and nothing
that stays.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

import hp_tool
from hp_tool.errors import InputError
from hp_tool.questions import schema
from hp_tool.traces import files
from service.app import create_app
from service.async_client import AsyncClient
from service.client import Client
from service.settings import Settings
from tests.formats.test_timers import LEVEL_1, LEVEL_2, log
from tests.service.processes import served
from tests.timeline.made import training, write

QUERY: dict[str, Any] = {
    "kind": "training",
    "model": "gpt-22b",
    "cluster": {"gpu": "a100-sxm-80gb", "num_gpus": 8},
    "training": {"sequence_length": 2048, "global_batch_size": 4},
    "parallel": {"tensor_parallel_size": 8, "micro_batch_size": 4, "recompute": "selective"},
}


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return write(training(fault="slow_rank"), tmp_path_factory.mktemp("traces"), packed=True)


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary files go: a server of this process."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def test_both_clients_get_what_the_command_says_and_nothing_is_kept(
    server: str, traces: list[Path], kept: Path
) -> None:
    with ExitStack() as opened:
        sent = [opened.enter_context(path.open("rb")) for path in traces]
        with Client(server=server) as client:
            alone = client.explain(traces=sent)
            beside = client.explain(traces=sent, query=QUERY)

        async def again() -> dict[str, Any]:
            async with AsyncClient(server=server) as client:
                return await client.explain(traces=sent, query=QUERY)

        assert asyncio.run(again()) == beside
    assert alone == json.loads(schema.to_json(hp_tool.explain(*traces)))
    assert beside == json.loads(schema.to_json(hp_tool.explain(*traces, query=QUERY)))
    assert alone["faults"][0]["kind"] == "slow_rank" and beside["parts"][0]["predicted_s"]
    assert not list(kept.iterdir())


def test_a_log_with_timers_is_taken_too(
    server: str, kept: Path, traces: list[Path], tmp_path: Path
) -> None:
    written = log(tmp_path / "train.log", "all", timers=LEVEL_1 | LEVEL_2, slow={2: 1.2})
    with (
        Client(server=server) as client,
        written.open("rb") as one,
        written.open("rb") as other,
        traces[0].open("rb") as trace,
    ):
        answer = client.explain(traces=[one], query=QUERY)
        with pytest.raises(
            InputError, match=r"^train\.log is a log. Pass either one log or traces"
        ):
            client.explain(traces=[trace, other])
    assert answer == json.loads(schema.to_json(hp_tool.explain(written, query=QUERY)))
    assert (
        "Rank 2 takes" in answer["findings"][0]["text"] and answer["parts"][0]["predicted_s"] > 0.0
    )
    assert not list(kept.iterdir())


@pytest.mark.components
@pytest.mark.parametrize(
    ("parts", "code", "field"),
    [
        ([("trace", ("../../a.json", b"{}"))], "no_trace", "trace"),
        ([("trace", ("a.json", b'[{"ph": '))], "cut_off", "trace"),
        (
            [("trace", ("a.json.gz", gzip.compress(b" " * (files.MIN_CHECKED_BYTES + 2**21))))],
            "zip_bomb",
            "trace",
        ),
        ([("trace", ("a.sqlite", b"SQLite format 3\x00" + b"\xff" * 200))], "syntax", "trace"),
        ([("trace", ("a.json", b"[]"))], "invalid_input", "trace"),
        ([("trace", (None, b"[]"))], "invalid_input", "trace"),
        ([("query", (None, b"{}"))], "missing_field", None),
        ([("trace", ("a", b"[]"))] * 257, "syntax", "body"),
        ([("trace", ("a", b"[]")), ("trase", ("b", b"[]"))], "unknown_key", "trase"),
    ],
)
def test_what_is_no_trace_is_refused_without_a_word_of_the_server(
    server: str, kept: Path, parts: list[Any], code: str, field: str | None
) -> None:
    answer = httpx.post(f"{server}/v1/explanations", files=parts, timeout=60)
    assert (answer.status_code, answer.json()["code"]) == (422, code), answer.text
    assert field is None or answer.json()["field"] == field
    assert str(kept) not in answer.text and "hp-explain" not in answer.text
    assert not list(kept.iterdir())


def test_an_upload_has_its_kind_and_its_rank_once(server: str, traces: list[Path]) -> None:
    plain = httpx.post(f"{server}/v1/explanations", json={}, timeout=60)
    assert (plain.status_code, plain.json()["code"]) == (422, "syntax")
    name = r"^rank0\.pt\.trace\.json\.gz: rank 0 is in another file"
    with (
        Client(server=server) as client,
        traces[0].open("rb") as trace,
        pytest.raises(InputError, match=name),
    ):
        client.explain(traces=[trace, trace])


@pytest.mark.components
def test_a_long_trace_ends_at_the_processor_time_of_a_request(tmp_path: Path) -> None:
    app = create_app(
        Settings(database_url=f"sqlite:///{tmp_path / 'hp.sqlite3'}", max_upload_cpu_s=0.2)
    )
    trace = (
        b"["
        + b'{"ph": "X", "cat": "kernel", "name": "gemm", "ts": 1, "dur": 1},' * 100_000
        + b"{}]"
    )
    with served(app) as url:
        answer = httpx.post(
            f"{url}/v1/explanations", files=[("trace", ("a.json", trace))], timeout=60
        )
    assert (answer.status_code, answer.json()["code"]) == (422, "request_too_costly")
    assert answer.json()["detail"].startswith(
        "Reading this upload needs more than 0.2 s of processor time"
    )

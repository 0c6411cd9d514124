"""Searches against a server that runs already: its load, what is recorded and learnt, and where its
key must not be.
"""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.request import urlopen

import numpy as np
import pytest

from hp_tool.cluster.launchers import create
from hp_tool.cluster.launchers.jobs import request_json
from hp_tool.cluster.profiler.endpoint import EndpointError, main, measure
from hp_tool.domain.measurement import Fidelity, Measurement
from hp_tool.domain.ports import Launcher
from hp_tool.domain.query import Query
from hp_tool.domain.requests import InferenceRequest
from hp_tool.domain.serving import ServingRecommendation
from hp_tool.domain.states import SearchState
from hp_tool.errors import InputError, LauncherError, UnsupportedError
from hp_tool.loop.tuning import TuneResult, resolve_search, tune
from hp_tool.loop.tuning.serving import build_serving
from hp_tool.questions.schema import allow_own_files, parse_query, query_mapping
from hp_tool.store import open_store
from tests.tuning import completions_server
from tests.tuning.completions_server import KEY
from tests.tuning.cpu_engine import CpuEngine

INPUT, OUTPUT = 24, 12


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A small real server, as a process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([sys.executable, completions_server.__file__, str(port)])
    base = f"http://127.0.0.1:{port}/v1"
    deadline = time.monotonic() + 30.0
    while True:
        try:
            urlopen(f"{base}/models", timeout=1.0).close()
            break
        except OSError:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
    yield base
    process.kill()
    process.wait()


@pytest.fixture
def catalogue(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The owner's entry of a cluster with an endpoint, whose key the environment holds."""
    monkeypatch.setenv("HP_RUNS_DIR", str(tmp_path / "runs"))
    monkeypatch.setenv("ENDPOINT_KEY", KEY)
    monkeypatch.setenv("HP_CATALOG_DIR", str(tmp_path / "catalogue"))
    entry = tmp_path / "catalogue" / "clusters" / "served.yaml"
    entry.parent.mkdir(parents=True)
    described(entry, url=url)
    return entry


def described(entry: Path, *, url: str, **options: Any) -> None:
    """Write the cluster's entry."""
    lines = {"url": url, "api_key_variable": "ENDPOINT_KEY", **options}
    entry.write_text(
        "gpu: cpu\ngpus_per_node: 1\nnum_gpus: 1\ninter_node_bandwidth_bytes_per_second: "
        "1.0e9\nfabric: none\nruns:\n"
        f"  launcher: endpoint\n  options: {lines}\n".replace("'", '"')
    )


def query(**changes: Any) -> Query:
    base: dict[str, Any] = {
        "kind": "inference",
        "model": {
            "name": "tiny",
            "num_hidden_layers": 2,
            "hidden_size": 128,
            "num_attention_heads": 4,
            "vocab_size": 512,
        },
        "cluster": "served",
        "inference": {
            "input_length": INPUT,
            "output_length": OUTPUT,
            "concurrency": 4,
            "precision": "fp32",
        },
        "parallel": {"max_num_seqs": [1, 4]},
        "search": {"budget_runs": 2, "steps": 3, "warmup_steps": 1, "run_timeout_s": 60},
    }
    for name, value in changes.items():
        base[name] = (
            {**base[name], **value}
            if isinstance(value, dict) and isinstance(base.get(name), dict)
            else value
        )
    base["inference"] = {
        name: value for name, value in base["inference"].items() if value is not None
    }
    return parse_query(base)


def run(asked: Query, tmp_path: Path, *, launcher: Launcher | None = None) -> TuneResult:
    store = open_store(f"sqlite:///{tmp_path / 'hp.sqlite3'}")
    try:
        return tune(query=asked, store=store, launcher=launcher)
    finally:
        store.close()


def told(url: str, *, reset: bool = False) -> dict[str, Any]:
    """What the server counted since it was last asked to forget."""
    with urlopen(f"{url}/models{'?reset=1' if reset else ''}") as response:
        return dict(json.load(response)["data"][0])


def rows(result: TuneResult) -> list[ServingRecommendation]:
    return [row for row in result.recommendations if isinstance(row, ServingRecommendation)]


@pytest.mark.components
def test_a_closed_load_is_measured_calibrated_and_its_key_is_nowhere(
    catalogue: Path, tmp_path: Path
) -> None:
    result = run(query(), tmp_path)
    assert result.search.state is SearchState.SUCCEEDED and result.search.profile_runs == 2
    by_batch = {row.parallel.max_num_seqs: row for row in rows(result)}
    for row in by_batch.values():
        seen, calibrated = row.measurement, row.calibrated_estimate
        assert (
            seen is not None
            and seen.serving is not None
            and seen.hardware is not None
            and calibrated is not None
        )
        assert (
            seen.hardware.declared
            and seen.hardware.gpu == "cpu"
            and seen.serving.runner == "endpoint"
        )
        assert seen.versions["vllm"] == "0.0.7" and len(seen.serving.ttft_times_s) == 3
        assert calibrated.ttft_s is not None and calibrated.intervals is not None
        low, high = calibrated.intervals.ttft_s
        assert low <= calibrated.ttft_s <= high and low <= seen.serving.ttft_s <= high
        # Little's law: 4 requests in flight end once a latency.
        latency_s = seen.serving.ttft_s + (OUTPUT - 1) * seen.serving.tpot_s
        assert seen.serving.output_tokens_per_second == pytest.approx(
            4 * OUTPUT / latency_s, rel=0.5
        )
    alone, together = (by_batch[batch].measurement.serving for batch in (1, 4))  # type: ignore[union-attr]
    assert alone is not None and together is not None
    assert alone.ttft_s > 2 * together.ttft_s  # three of four wait in the client
    for path in tmp_path.rglob("*"):
        assert not path.is_file() or KEY.encode() not in path.read_bytes(), path
    store = open_store(f"sqlite:///{tmp_path / 'hp.sqlite3'}")
    assert {each.framework for each in store.measurements(limit=9).items} == {
        "vllm-endpoint-serving"
    }
    assert store.list_calibrations(framework="vllm-endpoint-serving").items[0].num_measurements == 2
    store.close()


@dataclass
class InProcess(CpuEngine):
    """The endpoint's launcher, whose jobs are calls."""

    where: dict[str, Any] = field(default_factory=dict)

    def fetch(self, handle: str) -> Measurement:
        request = self.requests[handle]
        assert isinstance(request, InferenceRequest)
        return asyncio.run(measure(request, where=self.where, key=KEY))


@pytest.fixture
def engine(url: str) -> InProcess:
    return InProcess(
        num_gpus=1,
        where={
            "url": url,
            "model": None,
            "prompts": "tokens",
            "body": {"ignore_eos": True},
            "hosts": ["here"],
        },
    )


@pytest.mark.components
def test_a_poisson_load_arrives_at_its_rate(
    catalogue: Path, tmp_path: Path, engine: InProcess
) -> None:
    asked = query(
        inference={
            "concurrency": None,
            "request_rate_per_second": 20.0,
            "load": {"arrival": "poisson"},
        },
        parallel={"max_num_seqs": 64},
        search={"budget_runs": 1, "steps": 40},
    )
    (row,) = rows(run(asked, tmp_path, launcher=engine))
    assert (
        row.measurement is not None
        and row.measurement.serving is not None
        and row.calibrated_estimate is not None
    )
    (request,) = engine.requests.values()
    assert isinstance(request, InferenceRequest)
    rate = row.measurement.serving.output_tokens_per_second / OUTPUT
    assert rate == pytest.approx(20.0, rel=4.0 / (40 * request.num_requests) ** 0.5)
    assert row.calibrated_estimate.request_rate_per_second == pytest.approx(20.0)


def test_no_more_requests_are_in_flight_than_asked(
    url: str, catalogue: Path, tmp_path: Path, engine: InProcess
) -> None:
    told(url, reset=True)
    run(
        query(
            inference={"concurrency": 7}, parallel={"max_num_seqs": 5}, search={"budget_runs": 1}
        ),
        tmp_path,
        launcher=engine,
    )
    assert told(url)["most_at_once"] == 5


def test_a_trace_is_sent_as_it_says(
    url: str, catalogue: Path, tmp_path: Path, engine: InProcess
) -> None:
    """Lengths, times and shared beginnings of a file, which the stored search holds in itself."""
    rows_of = ((0.0, 8, 3, 0), (0.02, 40, 12, 30), (0.2, 16, 1, 4), (0.21, 33, 7, 30))
    (tmp_path / "trace.csv").write_text(
        "arrival_s,input_tokens,output_tokens,prefix_tokens\n"
        + "".join(f"{','.join(map(str, row))}\n" for row in rows_of)
    )
    lengths = {"input_length": None, "output_length": None, "concurrency": None}
    asked = query(
        inference={**lengths, "trace": str(tmp_path / "trace.csv")}, parallel={"max_num_seqs": 8}
    )
    told(url, reset=True)
    asked = replace(allow_own_files(asked), search=replace(asked.search, budget_runs=1, steps=12))
    (row,) = rows(run(asked, tmp_path, launcher=engine))
    seen = told(url)["seen"]
    assert [tuple(each[:2]) for each in seen[:8]] == [row[1:3] for row in rows_of] * 2
    beginnings = [each[2] for each in seen[:8]]
    assert (
        beginnings[1] == beginnings[2] == beginnings[3] == beginnings[5]
        and beginnings[0] not in beginnings[1:]
    )
    measured = row.measurement
    assert measured is not None and measured.serving is not None and row.estimate.tails is not None
    # Four answers in 0.21 s and the mean gap of 0.07 s.
    (request,) = engine.requests.values()
    assert (
        isinstance(request, InferenceRequest)
        and request.trace is not None
        and request.trace.arrival_s is not None
    )
    rate = measured.serving.output_tokens_per_second / np.mean([row[2] for row in rows_of])
    assert rate == pytest.approx(4 / 0.28, rel=0.4)


def test_quantiles_are_measured_calibrated_and_held_to_their_targets(
    catalogue: Path, tmp_path: Path, engine: InProcess
) -> None:
    wide, narrow = (
        run(
            query(
                inference={"output_length": 3},
                parallel={"max_num_seqs": [2, 4]},
                targets={"ttft_p99_s": limit},
                search={"budget_runs": 1},
            ),
            folder,
            launcher=engine,
        )
        for limit, folder in ((100.0, tmp_path), (1e-6, tmp_path))
    )
    measured, other = sorted(rows(wide), key=lambda row: row.measurement is None)
    assert measured.measurement is not None and measured.calibrated_estimate is not None
    times, load = measured.measurement.serving, measured.measurement.load
    assert (
        times is not None
        and times.tails is not None
        and load is not None
        and load.tails == times.tails
    )
    assert times.tails.ttft_s.p50 <= times.tails.ttft_s.p90 <= times.tails.ttft_s.p99
    assert (
        measured.calibrated_estimate.tails == times.tails and measured.calibrated_estimate.feasible
    )
    request = next(iter(engine.requests.values()))
    assert (
        isinstance(request, InferenceRequest) and request.repetitions * request.num_requests >= 100
    )
    # What did not run is off by as much as what did.
    assert (
        other.estimate.tails is not None
        and other.calibrated_estimate is not None
        and measured.estimate.tails is not None
    )
    assert (
        other.calibrated_estimate.tails is not None
        and other.calibrated_estimate.ttft_s
        and measured.estimate.ttft_s
    )
    off = (times.tails.ttft_s.p99 / times.ttft_s) / (
        measured.estimate.tails.ttft_s.p99 / measured.estimate.ttft_s
    )
    assert other.estimate.ttft_s is not None
    shape = off * other.estimate.tails.ttft_s.p99 / other.estimate.ttft_s
    assert (
        other.calibrated_estimate.tails.ttft_s.p99 / other.calibrated_estimate.ttft_s
        == pytest.approx(shape)
    )
    assert not narrow.recommendations and narrow.nearest_misses
    missed = narrow.nearest_misses[0].calibrated_estimate
    assert missed is not None and [reason.code for reason in missed.reasons] == ["target_missed"]


@pytest.mark.parametrize("rate", [1e9, 1e18])
def test_a_rate_that_nothing_bears_is_refused_by_its_name(
    rate: float, catalogue: Path, engine: InProcess
) -> None:
    asked = query(inference={"concurrency": None, "request_rate_per_second": rate})
    with pytest.raises(InputError, match="exceed the predicted maximum") as caught:
        build_serving(query=asked, query_json=query_mapping(asked), hardware=engine.hardware())
    assert (caught.value.field, caught.value.code) == (
        "inference.request_rate_per_second",
        "overloaded",
    )


def test_a_server_that_falls_behind_is_no_measurement(
    catalogue: Path, tmp_path: Path, engine: InProcess
) -> None:
    asked = query(
        inference={"concurrency": None, "request_rate_per_second": 3e3},
        parallel={"max_num_seqs": 1},
    )
    with pytest.raises(EndpointError, match="cannot sustain"):
        run(asked, tmp_path, launcher=engine)


def test_words_stand_for_tokens_where_a_server_takes_only_text(
    catalogue: Path, tmp_path: Path, engine: InProcess
) -> None:
    engine.where["prompts"] = "text"  # this server counts two tokens a word
    (row,) = rows(
        run(
            query(parallel={"max_num_seqs": 4}, search={"budget_runs": 1}),
            tmp_path,
            launcher=engine,
        )
    )
    assert row.measurement is not None and row.measurement.status == "ok"


@pytest.mark.parametrize(
    ("changes", "status", "cause"),
    [
        (
            {"body": {"x-fault": "short"}},
            "crashed",
            "the server counts 11 completion_tokens, not 12 as requested",
        ),
        ({"model": "tiny"}, "crashed", "unknown key Bearer ***"),
        ({"url": "http://127.0.0.1:9/v1"}, "preempted", "ConnectError"),
    ],
)
def test_what_is_no_measurement_says_why(
    changes: dict[str, Any],
    status: str,
    cause: str,
    catalogue: Path,
    engine: InProcess,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = query(parallel={"max_num_seqs": 4}, search={"budget_runs": 1})
    problem = build_serving(
        query=asked, query_json=query_mapping(asked), hardware=engine.hardware()
    )
    row = SimpleNamespace(
        id="r", parallel=problem.search.candidates.config(0), fidelity=Fidelity(), predicted={}
    )
    (tmp_path / "request.json").write_text(
        request_json().dump_json(problem.search.request(row)).decode()
    )  # type: ignore[arg-type]
    (tmp_path / "endpoint.json").write_text(json.dumps(engine.where | changes))
    key = "sk-wrong-1234" if "model" in changes else KEY
    monkeypatch.setenv("HP_ENDPOINT_API_KEY", key)
    assert main(tmp_path) == 1 and not (tmp_path / "result.json").exists()
    report = json.loads((tmp_path / "result.rank0.json").read_text())
    assert report["status"] == status and cause in report["cause"] and key not in json.dumps(report)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"inference": {"concurrency": None}}, "inference.concurrency"),
        ({"inference": {"think_time_s": 0.5}}, "inference.think_time_s"),
        ({"parallel": {"tensor_parallel_size": [1, 2]}}, "parallel.tensor_parallel_size"),
        ({"cluster": {"node_type": "served", "num_gpus": 2}}, "parallel.tensor_parallel_size"),
    ],
)
def test_what_an_endpoint_does_not_show_is_refused(
    catalogue: Path, changes: dict[str, Any], field: str
) -> None:
    with pytest.raises((UnsupportedError, InputError)) as caught:
        resolve_search(query(**changes))
    assert caught.value.field == field
    assert "think" not in field or "set request_rate_per_second instead" in str(caught.value)


def test_a_training_a_missing_key_and_a_silent_server_are_told(
    catalogue: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = {"sequence_length": 64, "global_batch_size": 4, "precision": "fp32"}
    with pytest.raises(InputError, match="support only inference queries"):
        resolve_search(
            parse_query(
                {"kind": "training", "model": "gpt-22b", "cluster": "served", "training": training}
            )
        )
    options = {"gpu": "cpu", "gpus_per_node": 1, "url": url, "api_key_variable": "ENDPOINT_KEY"}
    assert create("endpoint", options=options).answers() == "tiny on 1 x cpu, as declared"
    with pytest.raises(LauncherError, match="No response from"):
        create("endpoint", options=options | {"url": "http://127.0.0.1:9/v1"}).answers()
    monkeypatch.delenv("ENDPOINT_KEY")
    with pytest.raises(InputError, match=r"ENDPOINT_KEY, .* is not set"):
        create("endpoint", options=options)
    with pytest.raises(InputError, match="set either api_key or api_key_variable"):
        create("endpoint", options=options | {"api_key": "sk-1"})

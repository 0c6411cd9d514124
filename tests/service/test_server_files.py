"""No value that arrives over HTTP opens a file of the server, or tells whether there is one: every
route, every place of a query that holds text, every kind of file that the command line would read
there.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from hp_tool import catalog
from hp_tool.domain.measurement import Measurement
from hp_tool.domain.measurement_records import NewMeasurement
from hp_tool.domain.parallel import ParallelConfig
from hp_tool.domain.query import OwnFile
from hp_tool.errors import InputError
from hp_tool.loop.tuning import run_search
from hp_tool.store import SqlStore
from service.app import create_app
from service.settings import Settings
from tests.service.asking import PLACES, answers, asked, unknown_routes
from tests.service.coordinator import claim
from tests.service.opened import opened
from tests.service.routes import every_route
from tests.torch_or_skip import profiler_extra_or_skip

SECRET = "canary-in-a-file"
STEM, MISSING = "zzzzzzzzzzzzzzzzzzzk", "zzzzzzzzzzzzzzzzzzzj"
"""Files and a folder of this name are there, with the secret in them; of the other, none. Unlike
any name of the catalogue, which an answer would propose, and alike wherever an answer cuts them.
"""
FILES = {
    "{}.txt": f"{SECRET}\n",
    "{}.csv": f"{SECRET},{SECRET}\n",
    "{}.yaml": f"{SECRET}: 1\n",
    "{}/config.json": json.dumps({"model_type": SECRET}),
}
PATHS = (*FILES, "{}")
OF_FILES = ("model", "training.sequence_lengths")
"""Where the command line takes a path."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The server's working directory, so that a bare name reaches the files as well as a whole
    path.
    """
    here = tmp_path / "server"
    (here / STEM).mkdir(parents=True)
    for name, text in FILES.items():
        (here / name.format(STEM)).write_text(text)
    monkeypatch.chdir(here)
    return here


@pytest.fixture
def app(store: SqlStore) -> FastAPI:
    return create_app(Settings(poll_s=0.02), store=store)


@pytest.fixture
def http(app: FastAPI) -> Iterator[TestClient]:
    with TestClient(app, base_url="http://127.0.0.1:8000", follow_redirects=False) as client:
        yield client


def told(answer: httpx.Response, *, label: bool) -> tuple[int, str, str]:
    """What an answer says, whichever of the two names it was asked about; where it took the name
    for a label, only that.
    """
    text = "" if label and answer.is_success else answer.text.replace(MISSING, STEM)
    return answer.status_code, answer.headers.get("content-type", ""), text


def is_refusal(answer: httpx.Response, place: str) -> bool:
    """Whether it names the field at fault. Pages answer a form's or an address's mistakes beside
    their controls.
    """
    if not answer.headers["content-type"].startswith(
        ("application/json", "application/problem+json", "application/x-ndjson")
    ):
        return (
            answer.status_code == 422
            or "is a file path" in answer.text
            or "is called" in answer.text
        )
    said = answer.json()
    error = said["refused"][0] if said.get("refused") else said.get("error", said)
    return bool(error.get("code")) and str(error.get("field", "")).endswith(
        place.rpartition(".")[2]
    )


def attempts(place: str, folder: Path) -> tuple[str, ...]:
    """Paths to try: all kinds where the command line takes one, a YAML file at all other places."""
    return (*PATHS, f"{folder}/{{}}.yaml") if place in OF_FILES else ("{}.yaml",)


@pytest.mark.components
def test_no_value_of_a_query_reaches_a_file(app: FastAPI, http: TestClient, folder: Path) -> None:
    """Every route where the command line takes a path and at a sixth of all places, with a third of
    the paths: each place and each path on some routes.
    """
    assert min(tried(app, http, folder, places=6, paths=3).values()) > 0


@pytest.mark.long
def test_no_value_at_any_place_of_a_query_reaches_a_file(
    app: FastAPI, http: TestClient, folder: Path
) -> None:
    assert min(tried(app, http, folder, places=1, paths=1).values()) > 10


def tried(
    app: FastAPI, http: TestClient, folder: Path, *, places: int, paths: int
) -> dict[str, int]:
    """Ask each route about a file that is there and one that is not; how often each place was
    asked. Of so many places one is tried, of so many paths one; the places that take files on every
    route.
    """
    assert (
        unknown_routes(app) == []
    )  # a new route is told to `asking`: how it takes a query, or that it takes none
    assert set(OF_FILES) < set(PLACES)
    counts = dict.fromkeys(PLACES, 0)
    with opened(STEM) as found, opened(MISSING) as missed:
        routes = list(every_route(app))
        patterns = {route.pattern for route in routes}
        for number, route in enumerate(routes):
            twin = (
                f"{route.pattern}.json" in patterns
            )  # made of the same; what is a label everywhere is asked there
            some = [
                place
                for each, place in enumerate(PLACES)
                if (each + number) % places == 0 or place in OF_FILES
            ]
            for place in OF_FILES if twin else some:
                label = place not in OF_FILES or "cursor" in route.parameters
                kinds = attempts(place, folder)
                for path in kinds[number % min(paths, len(kinds)) :: paths]:
                    there = list(answers(http, route, place, path.format(STEM)))
                    absent = list(answers(http, route, place, path.format(MISSING)))
                    for one, other in zip(there, absent, strict=True):
                        assert told(one, label=label) == told(other, label=label), (
                            route,
                            place,
                            path,
                        )
                        assert SECRET not in one.text, (route, place, path)
                        assert one.status_code < 500, (route, place, path, one.text)
                    counts[place] += len(there)
                    assert (found, missed) == ([], []), (route, place, path)
    return counts


def test_what_it_looks_for_is_noticed(app: FastAPI, folder: Path) -> None:
    """A route of tomorrow, and a file that is opened."""
    app.add_api_route("/v1/tomorrow", lambda: None, methods=["POST"])
    app.add_api_route("/tomorrow.json", lambda question: None)
    assert unknown_routes(app) == ["POST /v1/tomorrow", "GET /tomorrow.json"]
    with opened(STEM) as found, pytest.raises(InputError, match=SECRET):
        catalog.model(OwnFile(f"{STEM}.yaml"))
    assert found == [f"{STEM}.yaml"]


@pytest.mark.parametrize("place", OF_FILES)
@pytest.mark.parametrize(
    "route",
    ["estimates", "recommendations", "batch", "searches", "measurements", "exports", "imports"],
)
def test_a_path_is_refused_by_its_field(
    app: FastAPI, http: TestClient, folder: Path, route: str, place: str
) -> None:
    address = next(
        each for each in every_route(app) if (each.method, each.pattern) == ("POST", f"/v1/{route}")
    )
    # Every kind of file on one route, the first kind on the others: routes share the refusal.
    for name in PATHS if route == "estimates" else PATHS[:1]:
        said = list(answers(http, address, place, str(folder / name.format(STEM))))
        for answer in (
            said[:1] if route in ("exports", "imports") else said
        ):  # whose other forms are other mistakes
            assert is_refusal(answer, place), (name, answer.text)
            assert SECRET not in answer.text
            in_a_list = route == "batch" or "refused" in answer.json()
            assert answer.status_code == (200 if in_a_list else 422), (name, answer.text)


def test_pages_over_stored_paths_open_none(
    app: FastAPI, http: TestClient, store: SqlStore, folder: Path
) -> None:
    profiler_extra_or_skip()
    """As another version, or someone at the database, may have stored them."""
    searches = []
    for place in OF_FILES:
        query = asked(place, str(folder / f"{STEM}.yaml"))
        searches.append((store.create_search(query=query).id, query))
    with opened(STEM) as found:
        for search, query in searches:
            lease = claim(store, search)
            with pytest.raises(InputError, match=r"is a file path"):
                run_search(store=store, lease=lease)
            config = ParallelConfig()
            store.add_measurement(
                measurement=NewMeasurement(
                    source="file",
                    cluster_key="cpu",
                    gpu="cpu",
                    framework="megatron-core",
                    model="m",
                    query=query,
                    parallel=config,
                    measurement=Measurement(status="ok", step_s=0.5),
                )
            )
        http.post("/v1/calibrations")
        for route in every_route(app):
            if route.method != "GET" or not (
                "{search_id}" in route.pattern or "from" in route.parameters
            ):
                continue
            for search, _ in searches:
                run = "0" * 16
                path = (
                    route.at(search_id=search, run_id=run)
                    if "{" in route.pattern
                    else route.pattern
                )
                parameters: dict[str, Any] = {
                    "from": search,
                    "format": "megatron-lm",
                    "a": run,
                    "b": run,
                }
                http.get(
                    path,
                    params={
                        name: value
                        for name, value in parameters.items()
                        if name in route.parameters
                    },
                )
    assert found == []

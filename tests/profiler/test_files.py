"""The profiler's files."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import TypeAdapter, ValidationError

from hp_tool.cluster.profiler.__main__ import failure_path, read_request, write_measurement
from hp_tool.domain.measurement import Measurement, ProfileRequest
from tests.profiler.requests import request


def test_a_request_survives_its_file(tmp_path: Path) -> None:
    asked = request(parallel={"tensor_parallel_size": 2, "sequence_parallel": True})
    path = tmp_path / "request.json"
    path.write_bytes(TypeAdapter(ProfileRequest).dump_json(asked))
    assert read_request(path) == asked


def test_an_unknown_key_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "request.json"
    text = TypeAdapter(ProfileRequest).dump_json(request()).decode()
    path.write_text(text.replace('"run_id"', '"tensor_paralel_size": 2, "run_id"'))
    with pytest.raises(ValidationError, match="tensor_paralel_size"):
        read_request(path)


def test_a_measurement_appears_whole_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    write_measurement(path, Measurement(status="ok", step_s=1.5))
    write_measurement(path, Measurement(status="ok", step_s=2.5))
    assert TypeAdapter(Measurement).validate_json(path.read_bytes()).step_s == 2.5
    assert list(tmp_path.iterdir()) == [path]


def test_each_rank_has_a_failure_file_of_its_own(tmp_path: Path) -> None:
    assert failure_path(tmp_path / "result.json", rank=3) == tmp_path / "result.rank3.json"

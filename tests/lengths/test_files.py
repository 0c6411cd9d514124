"""Distributions by name and from files; what is wrong with one is said by name."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from hp_tool.catalog import library
from hp_tool.catalog.lengths import FIELD, sequence_lengths
from hp_tool.domain.query import OwnFile
from hp_tool.errors import InputError, NotFoundError


@pytest.mark.parametrize("name", library.names("lengths"))
def test_named_distributions_are_proper_and_say_what_they_are(name: str) -> None:
    found = sequence_lengths(name)
    assert found.shares.sum() == pytest.approx(1.0) and np.all(found.shares > 0)
    assert np.all(np.diff(found.lengths) > 0) and found.lengths[0] >= 1
    source = library.entry("lengths", name).source
    assert source and name.startswith("synthetic-") == source.startswith("synthetic")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("mine.txt", "# tokens\n100\n300\n100\n300\n"),
        ("mine.csv", "300,2\n100,2\n"),
        ("mine.json", json.dumps({"counts": {"100": 5, "300": 5}})),
        ("mine.yaml", "counts: {300: 1, 100: 1}\n"),
    ],
)
def test_a_file_of_ones_own(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    found = sequence_lengths(OwnFile(tmp_path / name))
    assert found.name == "mine"
    assert (found.lengths.tolist(), found.shares.tolist()) == ([100, 300], [0.5, 0.5])


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.txt", "100\nmany\n", "'many' is not a whole number"),
        ("a.csv", "100,few\n", "'few' is not a number"),
        ("a.csv", "100,nan\n", "no lengths"),
        ("a.txt", "100\n0\n", "length 0"),
        ("a.txt", "-5\n", "length -5"),
        ("a.txt", "", "no lengths"),
        ("a.yaml", "counts: {100: 0}\n", "no lengths"),
        ("a.yaml", "counts: {100: 1e300}\n", "1e+300"),
        ("a.yaml", "log_norml: {}\n", "log_normal"),
        ("a.yaml", "source: here\n", "either log_normal or counts"),
        ("a.yaml", "log_normal: {}\n", "no component"),
        ("a.yaml", "log_normal: {a: {share: 1, median: 9}}\n", "missing sigma"),
        (
            "a.yaml",
            "log_normal: {a: {share: 1, median: 9, sigma: .nan}}\n",
            "sigma must be from 0.01 to 10",
        ),
        (
            "a.yaml",
            "shortest: 8\nlongest: 8\nlog_normal: {a: {share: 1, median: 8, sigma: 1}}\n",
            "less than longest",
        ),
        ("a.txt", "1\n" * 1_000_001, "the maximum is 1,000,000"),
        ("a.txt", "1\n" * 2_500_000, "exceeds"),
    ],
)
def test_what_is_wrong_with_a_file_is_said(tmp_path: Path, name: str, text: str, said: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(InputError) as caught:
        sequence_lengths(OwnFile(tmp_path / name))
    assert said in caught.value.message and caught.value.field.startswith(FIELD)


def test_a_missing_file_and_an_unknown_name_are_told_apart() -> None:
    with pytest.raises(InputError, match="cannot be read"):
        sequence_lengths(OwnFile("nowhere/lengths.txt"))
    with pytest.raises(NotFoundError, match="synthetic-code"):
        sequence_lengths("synthetic-cod")


def test_a_plain_name_is_no_file(tmp_path: Path) -> None:
    (tmp_path / "mine.csv").write_text("100\n")
    with pytest.raises(InputError, match="name of a distribution"):
        sequence_lengths(str(tmp_path / "mine.csv"))
    assert sequence_lengths("full-rows").mean > 0
